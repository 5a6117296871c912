//! Bindings of the functions of libnvrtc that this crate uses.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

use super::Version;

type Code = c_int;
type Handle = *mut c_void;
type ErrorString = unsafe extern "C" fn(Code) -> *const c_char;

const SUCCESS: Code = 0;

/// The functions of a loaded libnvrtc, which stays loaded until the process ends.
pub(super) struct Nvrtc {
    create: unsafe extern "C" fn(
        program: *mut Handle,
        source: *const c_char,
        name: *const c_char,
        headers: c_int,
        texts: *const *const c_char,
        names: *const *const c_char,
    ) -> Code,
    compile: unsafe extern "C" fn(Handle, options: c_int, *const *const c_char) -> Code,
    log_size: unsafe extern "C" fn(Handle, *mut usize) -> Code,
    log: unsafe extern "C" fn(Handle, *mut c_char) -> Code,
    cubin_size: unsafe extern "C" fn(Handle, *mut usize) -> Code,
    cubin: unsafe extern "C" fn(Handle, *mut c_char) -> Code,
    destroy: unsafe extern "C" fn(*mut Handle) -> Code,
    error_string: ErrorString,
    pub(super) version: Version,
    /// The path of the library; the requested name if the system does not report the path.
    pub(super) path: PathBuf,
}

/// The inputs of a compilation, as C strings.
pub(super) struct Input {
    pub(super) source: CString,
    pub(super) name: CString,
    pub(super) header_names: Vec<CString>,
    pub(super) header_texts: Vec<CString>,
    pub(super) options: Vec<CString>,
}

/// The machine code of a compilation or the reason why it failed, and the compiler's output.
pub(super) struct Output {
    pub(super) cubin: Result<Vec<u8>, String>,
    pub(super) log: String,
}

impl Nvrtc {
    /// Loads the library that the dynamic loader finds under `file`, a path or a bare name.
    pub(super) fn load(file: &OsStr) -> Result<Self, String> {
        // SAFETY: by its name, or because the user has chosen it, the file is NVIDIA's compiler, whose initialisers have no
        // requirements.
        let library = unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) };
        // Never unload the compiler: its threads or exit handlers may still run.
        let library: &'static Library = Box::leak(Box::new(library.map_err(words)?));
        type VersionOf = unsafe extern "C" fn(*mut c_int, *mut c_int) -> Code;
        // SAFETY: the types are those of NVRTC's header.
        let (version_of, error_string) = unsafe {
            (
                symbol::<VersionOf>(library, "nvrtcVersion")?,
                symbol::<ErrorString>(library, "nvrtcGetErrorString")?,
            )
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both point to local integers.
        check(error_string, unsafe { version_of(&raw mut major, &raw mut minor) })?;
        let version = Version { major: major.unsigned_abs(), minor: minor.unsigned_abs() };
        let path = mapped_file(version_of as usize).unwrap_or_else(|| PathBuf::from(file));
        preload_builtins(&path, version)?;
        // SAFETY: the types are those of NVRTC's header, which are the same in version 12.0 and all later ones.
        unsafe {
            Ok(Self {
                create: symbol(library, "nvrtcCreateProgram")?,
                compile: symbol(library, "nvrtcCompileProgram")?,
                log_size: symbol(library, "nvrtcGetProgramLogSize")?,
                log: symbol(library, "nvrtcGetProgramLog")?,
                cubin_size: symbol(library, "nvrtcGetCUBINSize")?,
                cubin: symbol(library, "nvrtcGetCUBIN")?,
                destroy: symbol(library, "nvrtcDestroyProgram")?,
                error_string,
                version,
                path,
            })
        }
    }

    /// Compiles a program. Several threads may compile at the same time.
    pub(super) fn compile(&self, input: &Input) -> Output {
        let mut log = String::new();
        let cubin = self.create(input).and_then(|program| {
            let options: Vec<_> = input.options.iter().map(|option| option.as_ptr()).collect();
            // SAFETY: `program.handle` is a program of this library; the options are C strings that `input` owns.
            let code = unsafe { (self.compile)(program.handle, options.len() as c_int, options.as_ptr()) };
            log = program.bytes(self.log_size, self.log).map(text)?;
            check(self.error_string, code)?;
            program.bytes(self.cubin_size, self.cubin)
        });
        Output { cubin, log }
    }

    fn create(&self, input: &Input) -> Result<Program<'_>, String> {
        let texts: Vec<_> = input.header_texts.iter().map(|text| text.as_ptr()).collect();
        let names: Vec<_> = input.header_names.iter().map(|name| name.as_ptr()).collect();
        assert_eq!(texts.len(), names.len());
        let mut handle = ptr::null_mut();
        // SAFETY: all are C strings that `input` owns, and the call copies them; the numbers of names and texts are equal.
        let code = unsafe {
            (self.create)(
                &raw mut handle,
                input.source.as_ptr(),
                input.name.as_ptr(),
                texts.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        check(self.error_string, code)?;
        Ok(Program { nvrtc: self, handle })
    }
}

/// A program of the compiler; dropping the value destroys it.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: Handle,
}

impl Program<'_> {
    /// Reads a byte array of which `size_of` returns the size and `copy` the bytes.
    fn bytes(
        &self,
        size_of: unsafe extern "C" fn(Handle, *mut usize) -> Code,
        copy: unsafe extern "C" fn(Handle, *mut c_char) -> Code,
    ) -> Result<Vec<u8>, String> {
        let mut size = 0;
        // SAFETY: `size` is a local number.
        check(self.nvrtc.error_string, unsafe { size_of(self.handle, &raw mut size) })?;
        let mut bytes = vec![0; size];
        // SAFETY: there is room for as many bytes as the compiler said it would write.
        check(self.nvrtc.error_string, unsafe { copy(self.handle, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle came from `create` and is not used again. A failure is ignored: it only leaks memory.
        unsafe { (self.nvrtc.destroy)(&raw mut self.handle) };
    }
}

/// Looks up a function of the library.
///
/// # Safety
/// `T` is the type of a pointer to the library's function `name`.
unsafe fn symbol<T: Copy>(library: &'static Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller guarantees that the type is right.
    match unsafe { library.get::<T>(name) } {
        Ok(symbol) => Ok(*symbol),
        Err(error) => Err(format!("not NVRTC 12.0 or later: {}", words(error))),
    }
}

fn check(error_string: ErrorString, code: Code) -> Result<(), String> {
    if code == SUCCESS {
        return Ok(());
    }
    // SAFETY: the function takes any code and returns a text that lives as long as the library, or null.
    let name = unsafe { error_string(code).as_ref().map(|text| CStr::from_ptr(text)) };
    Err(name.map_or_else(|| format!("NVRTC error {code}"), |name| name.to_string_lossy().into_owned()))
}

/// Loads the compiler's second library, which the compiler opens by its bare name. Some versions (13.0) do not search
/// for it in their own directory, but a library that is already loaded is found by its bare name.
fn preload_builtins(nvrtc: &Path, version: Version) -> Result<(), String> {
    let builtins = nvrtc.with_file_name(format!("libnvrtc-builtins.so.{version}"));
    if !fs::exists(&builtins).unwrap_or(false) {
        // The loader may find it elsewhere; otherwise compiling fails with a reason.
        return Ok(());
    }
    // SAFETY: as for the compiler, of which this library is a part.
    match unsafe { Library::open(Some(&builtins), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(library) => {
            Box::leak(Box::new(library));
            Ok(())
        }
        Err(error) => Err(words(error)),
    }
}

/// The text of the dynamic loader's error.
fn words(error: libloading::Error) -> String {
    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// The file that is mapped at an address of this process.
fn mapped_file(address: usize) -> Option<PathBuf> {
    file_at(&fs::read_to_string("/proc/self/maps").ok()?, address)
}

/// The file of the line whose address range contains `address`. Lines look like
/// `7f00-7f10 r-xp 0000 08:01 42    /lib/a.so`.
fn file_at(maps: &str, address: usize) -> Option<PathBuf> {
    let line = maps.lines().find(|line| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        range.is_some_and(|(start, end)| {
            let parse = |text| usize::from_str_radix(text, 16).ok();
            matches!((parse(start), parse(end)), (Some(start), Some(end)) if (start..end).contains(&address))
        })
    })?;
    // The path begins at the first slash of the line: the fields before it contain no slash.
    line.find('/').map(|at| PathBuf::from(&line[at..]))
}

/// The bytes of a C string as text, without the terminating zero.
fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).trim_end_matches('\0').trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_an_address_is_found() {
        let maps = "\
7f0000000000-7f0000001000 r--p 00000000 08:01 42                         /lib/a.so
7f0000001000-7f0000002000 r-xp 00001000 08:01 42                         /lib/with space/b.so
7f0000002000-7f0000003000 rw-p 00000000 00:00 0 
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
";
        assert_eq!(file_at(maps, 0x7f00_0000_0fff), Some("/lib/a.so".into()));
        assert_eq!(file_at(maps, 0x7f00_0000_1000), Some("/lib/with space/b.so".into()));
        assert_eq!(file_at(maps, 0x7f00_0000_2000), None);
        assert_eq!(file_at(maps, 0x7ffc_0000_0000), None);
        assert_eq!(file_at(maps, 0x1000), None);
        assert_eq!(file_at("nonsense\n-\n", 0), None);
    }

    #[test]
    fn files_that_are_not_the_compiler_are_refused_with_the_reason() {
        let refusal = |file: &str| Nvrtc::load(OsStr::new(file)).err().unwrap();
        assert!(refusal("/nowhere/libnvrtc.so.13").contains("/nowhere/libnvrtc.so.13"));
        // A library, but not the compiler.
        assert!(refusal("libc.so.6").contains("nvrtcVersion"));
    }
}
