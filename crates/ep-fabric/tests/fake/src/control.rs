//! How tests load and control the fake.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::fmt;
use std::path::{Path, PathBuf};

use libloading::{Library, Symbol};

use crate::settings::{Offer, Settings};
use crate::world::Copy;

/// One provider of the fake. Tests run at the same time, so each test gives its provider a name of its own.
pub struct Fake {
    library: Library,
    path: PathBuf,
    provider: String,
}

impl fmt::Debug for Fake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fake").field("provider", &self.provider).field("path", &self.path).finish()
    }
}

/// What the fake has recorded about a provider.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Objects that are not closed, by kind.
    pub open: BTreeMap<String, u64>,
    /// Endpoints that were opened, by NIC.
    pub endpoints: BTreeMap<String, u64>,
    /// Puts that were posted, by NIC.
    pub puts: BTreeMap<String, u64>,
    /// Endpoints that were opened, by traffic class.
    pub classes: BTreeMap<u32, u64>,
    /// Attempts to deliver an immediate without a posted receive.
    pub waits: u64,
    /// Regions in the memory of GPUs that were registered.
    pub gpu_regions: u64,
    /// Calls that libfabric does not allow.
    pub wrong: Vec<String>,
}

/// The library that Cargo builds with this test, next to the test's program.
pub fn path() -> PathBuf {
    let path =
        std::env::current_exe().expect("this program has a path").with_file_name("libep_fabric_fake.so");
    assert!(
        path.exists(),
        "{} does not exist: Cargo puts the cdylib of a dependency elsewhere",
        path.display()
    );
    path
}

fn c_string(text: &str) -> CString {
    CString::new(text).expect("no zero byte")
}

impl Fake {
    /// A provider with one NIC.
    pub fn new(provider: &str, settings: &Settings) -> Self {
        let fake = Self::without_nics(provider);
        fake.offer("nic0", "198.51.100.1", settings);
        fake
    }

    /// A provider without a NIC.
    pub fn without_nics(provider: &str) -> Self {
        Self::at(path(), provider)
    }

    /// A provider of the library at another path, which has a state of its own.
    pub fn at(path: PathBuf, provider: &str) -> Self {
        // SAFETY: the fake has no constructors.
        let library = unsafe { Library::new(&path) }.expect("the fake can be loaded");
        Self { library, path, provider: provider.into() }
    }

    /// # Safety
    /// `T` must be the type of the function with this name.
    unsafe fn symbol<T>(&self, name: &str) -> Symbol<'_, T> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.library.get(name) }.expect("the fake exports it")
    }

    /// Adds a NIC.
    pub fn offer(&self, domain: &str, node: &str, settings: &Settings) {
        let [provider, domain, node] = [&*self.provider, domain, node].map(c_string);
        let (provider, domain, node) = (provider.as_ptr(), domain.as_ptr(), node.as_ptr());
        let offer = Offer { provider, domain, node, settings: *settings };
        // SAFETY: the function's type. The offer and its strings live during the call.
        unsafe {
            let call: Symbol<unsafe extern "C" fn(*const Offer)> = self.symbol("fake_offer");
            call(&offer);
        }
    }

    /// Sets the version that the library claims to have.
    pub fn set_version(&self, version: u32) {
        // SAFETY: the function's type.
        unsafe {
            let call: Symbol<extern "C" fn(u32)> = self.symbol("fake_set_version");
            call(version);
        }
    }

    /// Declares `len` bytes to be memory of a GPU: they must be registered as such.
    pub fn set_gpu_memory(&self, start: usize, len: usize) {
        // SAFETY: the function's type.
        unsafe {
            let call: Symbol<extern "C" fn(usize, usize)> = self.symbol("fake_set_gpu_memory");
            call(start, len);
        }
    }

    /// Makes this function copy all bytes, in the memory of the host and of GPUs.
    pub fn set_copy(&self, copy: Copy) {
        // SAFETY: the function's type.
        unsafe {
            let call: Symbol<extern "C" fn(Copy)> = self.symbol("fake_set_copy");
            call(copy);
        }
    }

    /// The provider's name.
    pub fn provider(&self) -> &str {
        &self.provider
    }

    /// The path of the library.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is recorded about the provider.
    pub fn report(&self) -> Report {
        let provider = c_string(&self.provider);
        let mut text = vec![0u8; 1 << 16];
        type Call = unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> usize;
        // SAFETY: the function's type; a string, and the room that is stated.
        let len = unsafe {
            let call: Symbol<Call> = self.symbol("fake_report");
            call(provider.as_ptr(), text.as_mut_ptr().cast(), text.len())
        };
        text.truncate(len);
        let mut report = Report::default();
        for line in String::from_utf8_lossy(&text).lines() {
            let words: Vec<&str> = line.splitn(3, ' ').collect();
            let &[word, number, what] = &words[..] else { panic!("{line}") };
            let (number, what) = (number.parse().expect("a number"), what.to_string());
            match word {
                "open" => drop(report.open.insert(what, number)),
                "endpoint" => drop(report.endpoints.insert(what, number)),
                "puts" => drop(report.puts.insert(what, number)),
                "class" => drop(report.classes.insert(what.parse().expect("a class"), number)),
                "waits" => report.waits = number,
                "gpu" => report.gpu_regions = number,
                "wrong" => report.wrong.push(what),
                _ => panic!("{line}"),
            }
        }
        report
    }

    /// Fails unless all objects are closed, and all calls were allowed.
    #[track_caller]
    pub fn assert_clean(&self, context: &str) -> Report {
        let report = self.report();
        assert_eq!((&report.open, &report.wrong), (&BTreeMap::new(), &Vec::new()), "{context}");
        report
    }
}
