//! Settings in environment variables: their names, for a warning about misspelled ones, and how to read one.

use std::ffi::OsStr;
use std::sync::Once;

/// The prefix of the names of all settings.
const PREFIX: &str = "HYBRID_EP_";

/// All settings of this project, without the prefix; `docs/tuning.md` explains them.
const SETTINGS: &[&str] = &[
    "CHUNK_TOKENS",
    "CUDA_LANE_BYTES",
    "CUDA_RAIL_CHOICES",
    "CUDA_RAIL_TOKENS",
    "GENERATION",
    "KERNEL_CACHE",
    "LEND",
    "LIBFABRIC",
    "MACHINE",
    "NVRTC",
    "PLAIN_COPIES",
    "SECRET",
    "SECRET_FILE",
    "SLOTS",
    "SLOT_BYTES",
    "SMS",
    "STALL_TIMEOUT_MS",
    "STORE",
    "STREAMING_BYTES",
    "TIMEOUT_MS",
    "TRANSPORT",
    "TRANSPORT_ADDRESS",
    "TRANSPORT_GPU_MEMORY",
    "TRANSPORT_NIC",
    "TRANSPORT_TRAFFIC_CLASS",
    "WORKERS",
];

/// The variables of the project's tests, without the prefix.
const OF_TESTS: &[&str] = &[
    "LIBFABRIC_INCLUDE",
    "LIFETIME_TEST",
    "PYTHON_TESTS",
    "RANDOM_CASES",
    "REQUIRE_LIBFABRIC",
    "REQUIRE_NVRTC",
    "UPDATE_PARAMS",
    "UPDATE_RESOURCES",
];

/// The value of an environment variable. A value that is not UTF-8 becomes a text that no setting allows, so it is
/// refused, not ignored.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Names on stderr, once per process, the variables that look like settings but are not.
pub(crate) fn tell_unknown() {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        let mut unknown: Vec<String> = std::env::vars_os().filter_map(|(name, _)| unknown(&name)).collect();
        unknown.sort_unstable();
        for name in unknown {
            crate::tell(format_args!(
                "the environment variable {name} is not a setting of this version and has no effect"
            ));
        }
    });
}

/// The name, if it has the prefix of settings but is not a setting.
fn unknown(name: &OsStr) -> Option<String> {
    let name = name.to_string_lossy();
    let setting = name.strip_prefix(PREFIX)?;
    let known = SETTINGS.contains(&setting) || OF_TESTS.contains(&setting);
    (!known).then(|| name.escape_debug().to_string())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn misspelled_settings_are_noticed() {
        let told = |name: &str| unknown(OsStr::new(name));
        assert_eq!(told("HYBRID_EP_TIMOUT_MS").as_deref(), Some("HYBRID_EP_TIMOUT_MS"));
        assert_eq!(told("HYBRID_EP_").as_deref(), Some("HYBRID_EP_"));
        assert_eq!(told("HYBRID_EP_A\nB").as_deref(), Some("HYBRID_EP_A\\nB"));
        for name in ["HYBRID_EP_TIMEOUT_MS", "HYBRID_EP_RANDOM_CASES", "HYBRID_EP", "PATH", "hybrid_ep_x"] {
            assert_eq!(told(name), None);
        }
    }

    /// Adds to `names` the variables that strings in the files of a directory name, without the prefix.
    fn named(directory: &Path, names: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                named(&path, names);
            } else if let Ok(text) = std::fs::read_to_string(&path) {
                for rest in text.split(&format!("\"{PREFIX}")).skip(1) {
                    let name = rest.split_once('"').map_or("", |(name, _)| name);
                    let is_name =
                        !name.is_empty() && name.bytes().all(|at| at == b'_' || at.is_ascii_uppercase());
                    names.extend(is_name.then(|| name.to_owned()));
                }
            }
        }
    }

    /// The lists are sorted, and have every name that a string in the sources has.
    #[test]
    #[cfg_attr(miri, ignore = "reads files")]
    fn the_lists_have_every_setting_of_the_sources() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut found = BTreeSet::new();
        for crate_ in std::fs::read_dir(root.join("crates")).unwrap() {
            named(&crate_.unwrap().path().join("src"), &mut found);
        }
        named(&root.join("python/src"), &mut found);
        named(&root.join("python/hybrid_ep"), &mut found);
        // The misspelled name in the test above.
        found.remove("TIMOUT_MS");
        let listed: BTreeSet<String> = SETTINGS.iter().chain(OF_TESTS).map(|&name| name.to_owned()).collect();
        assert!(found.is_subset(&listed), "not listed: {:?}", found.difference(&listed));
        assert!(SETTINGS.is_sorted() && OF_TESTS.is_sorted());
        let guide = std::fs::read_to_string(root.join("docs/tuning.md")).unwrap();
        for name in SETTINGS {
            assert!(guide.contains(&format!("`{PREFIX}{name}`")), "{name} is not in docs/tuning.md");
        }
    }
}
