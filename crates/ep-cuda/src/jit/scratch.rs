//! Temporary directories for tests.

use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// A temporary directory; dropping the value removes it.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("hybrid-ep-jit-{}-{number}", std::process::id()));
        fs::DirBuilder::new().mode(0o700).create(&dir).unwrap();
        Self(dir)
    }

    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    pub(super) fn write(&self, path: &str, text: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A failure is ignored: it only leaves files in the temporary directory.
        let _ = fs::remove_dir_all(&self.0);
    }
}
