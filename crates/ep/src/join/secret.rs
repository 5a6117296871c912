//! The job secret, with which ranks prove that they are members of a job, and the keys derived from it.

use std::fmt;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::{Digest as _, Sha256};

use crate::error::{CallerError, EnvironmentError, Result};

/// The variable that holds the secret, and the variable that names a file with it.
const VARIABLE: &str = "HYBRID_EP_SECRET";
const FILE_VARIABLE: &str = "HYBRID_EP_SECRET_FILE";
/// The longest file with a secret, in bytes.
const MAX_FILE: usize = 4096;

/// The job secret: bytes that only the members of a job know. The `Debug` text omits it.
#[derive(Clone)]
pub struct Secret(Key);

impl Secret {
    /// The shortest secret, in bytes.
    pub const MIN_BYTES: usize = 16;

    /// A secret of these bytes, which should be random.
    ///
    /// # Errors
    /// [`CallerError::Config`] when it is shorter than [`MIN_BYTES`](Self::MIN_BYTES).
    pub fn new(secret: &[u8]) -> Result<Self> {
        Self::named("secret", secret)
    }

    fn named(key: &'static str, secret: &[u8]) -> Result<Self> {
        if secret.len() < Self::MIN_BYTES {
            return Err(CallerError::Config {
                key,
                value: format!("({} bytes)", secret.len()),
                problem: format!(
                    "must have at least {} bytes; use random ones, for example from `openssl rand -hex 32`",
                    Self::MIN_BYTES
                ),
            }
            .into());
        }
        Ok(Self(Key::of(b"hybrid-ep job secret", secret)))
    }

    /// A random secret as text (64 hexadecimal digits), for `HYBRID_EP_SECRET` of the processes of a job.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the system provides no random numbers.
    pub fn random_text() -> Result<String> {
        Ok(random()?.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The secret of the environment: `HYBRID_EP_SECRET`, else the content of the file that `HYBRID_EP_SECRET_FILE`
    /// names, both without trailing white space; `None` when neither is set. The file must be a regular file of this
    /// user, with no permissions for other users and at most 4096 bytes.
    ///
    /// # Errors
    /// [`CallerError::Config`] for a secret that is too short, or a file that does not meet these conditions.
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_lookup(|key| std::env::var_os(key))
    }

    fn from_lookup(lookup: impl Fn(&str) -> Option<std::ffi::OsString>) -> Result<Option<Self>> {
        if let Some(secret) = lookup(VARIABLE) {
            return Self::named(VARIABLE, secret.as_encoded_bytes().trim_ascii_end()).map(Some);
        }
        let Some(path) = lookup(FILE_VARIABLE) else { return Ok(None) };
        let refuse = |problem: String| CallerError::Config {
            key: FILE_VARIABLE,
            value: path.to_string_lossy().into_owned(),
            problem,
        };
        let secret = read_private(path.as_ref()).map_err(refuse)?;
        Self::named(FILE_VARIABLE, secret.trim_ascii_end()).map(Some)
    }

    pub(super) fn key(&self) -> &Key {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The content of a file that only its owner can access. The function opens the file first and then checks the open
/// file, so that another user cannot replace it in between.
#[cfg(unix)]
fn read_private(path: &std::path::Path) -> std::result::Result<Vec<u8>, String> {
    use std::io::Read as _;

    use rustix::fs::{FileType, Mode, OFlags, fstat, open};
    // Opening a FIFO must not block, and opening a terminal must not make it this process's controlling terminal.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = open(path, flags, Mode::empty()).map_err(|error| format!("opening it: {error}"))?;
    let stat = fstat(&file).map_err(|error| format!("reading its attributes: {error}"))?;
    let uid = rustix::process::geteuid().as_raw();
    let mode = Mode::from_raw_mode(stat.st_mode);
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err("must be a regular file".into());
    }
    if stat.st_uid != uid {
        return Err(format!(
            "must belong to the user that runs the job (uid {uid}), not to uid {}",
            stat.st_uid
        ));
    }
    if mode.intersects(Mode::RWXG | Mode::RWXO) {
        let mode = mode.as_raw_mode() & 0o777;
        return Err(format!("must not be accessible to other users, but has mode {mode:03o}; run chmod 600"));
    }
    let mut secret = Vec::new();
    let most = MAX_FILE as u64 + 1;
    std::fs::File::from(file)
        .take(most)
        .read_to_end(&mut secret)
        .map_err(|error| format!("reading it: {error}"))?;
    if secret.len() > MAX_FILE {
        return Err(format!("must have at most {MAX_FILE} bytes"));
    }
    Ok(secret)
}

#[cfg(not(unix))]
fn read_private(_: &std::path::Path) -> std::result::Result<Vec<u8>, String> {
    Err("needs a Unix system, where files have owners and modes; set HYBRID_EP_SECRET".into())
}

/// 32 random bytes from the system, suitable for keys.
pub(super) fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)
        .map_err(|error| EnvironmentError::new("asking the system for random numbers", error, ""))?;
    Ok(bytes)
}

/// An HMAC-SHA256 code, which only a holder of the key can make. Also used as a derived key.
pub(super) type Code = [u8; 32];

/// A key for HMAC-SHA256. The `Debug` text omits it.
#[derive(Clone)]
pub(super) struct Key([u8; 32]);

impl Key {
    /// The key derived from `bytes`. Keys of different `purpose` are independent.
    pub(super) fn of(purpose: &[u8], bytes: &[u8]) -> Self {
        let mut hash = Sha256::new();
        hash.update((purpose.len() as u64).to_le_bytes());
        hash.update(purpose);
        hash.update(bytes);
        Self(hash.finalize().into())
    }

    /// A key that only a holder of this key can derive.
    pub(super) fn derive(&self, purpose: &[u8], parts: &[&[u8]]) -> Self {
        Self(self.code(purpose, parts))
    }

    /// The code over `parts`. It covers the length of each part, so that bytes cannot move between parts.
    pub(super) fn code(&self, purpose: &[u8], parts: &[&[u8]]) -> Code {
        self.over(purpose, parts).finalize().into_bytes().into()
    }

    /// Whether `code` is the code over `parts`. Compares in constant time.
    pub(super) fn verify(&self, purpose: &[u8], parts: &[&[u8]], code: &[u8]) -> bool {
        self.over(purpose, parts).verify_slice(code).is_ok()
    }

    fn over(&self, purpose: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        for part in std::iter::once(&purpose).chain(parts) {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    const TEXT: &str = "correct horse battery staple";

    fn found(pairs: &[(&str, &str)]) -> std::result::Result<Option<Secret>, String> {
        let lookup =
            |key: &str| pairs.iter().find(|(k, _)| *k == key).map(|(_, value)| OsString::from(value));
        Secret::from_lookup(lookup).map_err(|error| error.to_string())
    }

    fn code(secret: &Secret) -> Code {
        secret.key().code(b"test", &[])
    }

    #[test]
    fn a_code_depends_on_every_part_and_its_bounds() {
        let key = Key::of(b"a", b"b");
        let code = key.code(b"p", &[b"xy", b"z"]);
        assert!(key.verify(b"p", &[b"xy", b"z"], &code));
        assert!(!key.verify(b"q", &[b"xy", b"z"], &code));
        assert!(!key.verify(b"p", &[b"x", b"yz"], &code));
        assert!(!key.verify(b"p", &[b"xy", b"z"], &code[1..]));
        assert!(!Key::of(b"ab", b"").verify(b"p", &[b"xy", b"z"], &code));
        assert!(!key.derive(b"d", &[]).verify(b"p", &[b"xy", b"z"], &code));
    }

    #[test]
    fn the_variable_comes_before_the_file_and_no_text_shows_the_secret() {
        assert!(found(&[]).unwrap().is_none());
        let secret = found(&[(VARIABLE, TEXT), (FILE_VARIABLE, "/nonexistent")]).unwrap().unwrap();
        assert_eq!(code(&secret), code(&Secret::new(TEXT.as_bytes()).unwrap()));
        assert_eq!(format!("{secret:?} {:?}", secret.key()), "Secret(..) Key(..)");
        let short = found(&[(VARIABLE, "0123456789abcde")]).unwrap_err();
        assert!(short.starts_with("HYBRID_EP_SECRET = (15 bytes): must have at least 16 bytes"), "{short}");
        assert!(!short.contains("abcde"));
        assert!(found(&[(VARIABLE, "")]).is_err());
        assert_ne!(Secret::random_text().unwrap(), Secret::random_text().unwrap());
        assert!(Secret::new(Secret::random_text().unwrap().as_bytes()).is_ok());
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_other_users_can_access_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;

        use rustix::fs::{CWD, Mode, mkfifoat};
        let dir = std::env::temp_dir().join(format!("hybrid-ep-secret-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("secret");
        std::fs::write(&path, format!("{TEXT}\n")).unwrap();
        let with_mode = |mode: u32| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            found(&[(FILE_VARIABLE, path.to_str().unwrap())])
        };
        assert_eq!(code(&with_mode(0o600).unwrap().unwrap()), code(&Secret::new(TEXT.as_bytes()).unwrap()));
        for mode in [0o640, 0o604, 0o620, 0o601] {
            let error = with_mode(mode).unwrap_err();
            assert!(error.contains("chmod 600") && error.contains(&format!("mode {mode:03o}")), "{error}");
        }
        std::fs::write(&path, vec![b'x'; MAX_FILE]).unwrap();
        assert!(with_mode(0o600).unwrap().is_some());
        std::fs::write(&path, vec![b'x'; MAX_FILE + 1]).unwrap();
        assert!(with_mode(0o600).unwrap_err().contains("at most 4096 bytes"));
        let refused = |path: &std::path::Path| found(&[(FILE_VARIABLE, path.to_str().unwrap())]).unwrap_err();
        assert!(refused(&dir).contains("must be a regular file"));
        let fifo = dir.join("fifo");
        mkfifoat(CWD, &fifo, Mode::RUSR | Mode::WUSR).unwrap();
        assert!(refused(&fifo).contains("must be a regular file"));
        assert!(refused(&dir.join("none")).contains("opening it"));
        if rustix::process::geteuid().is_root() {
            std::fs::write(&path, TEXT).unwrap();
            std::os::unix::fs::chown(&path, Some(65_533), None).unwrap();
            assert!(refused(&path).contains("must belong to the user"), "{}", refused(&path));
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
