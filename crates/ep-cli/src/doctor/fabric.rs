//! The providers of libfabric, which carry bytes between domains with `--transport`.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::fact::Fact;

/// Longest wait for the library, which looks for devices when it is loaded.
const PATIENCE: Duration = Duration::from_secs(30);

/// Asks the library that the host backend would use. Absent where it cannot be loaded.
pub(super) fn providers() -> Fact<Vec<String>> {
    let library = match ep::Config::from_env() {
        Ok(config) => config.host.transport.libfabric,
        Err(error) => return Fact::Unknown(error.to_string()),
    };
    let (sender, answer) = mpsc::channel();
    // The receiver is gone if the answer comes too late.
    thread::spawn(move || drop(sender.send(ep_fabric::providers(library.as_deref()))));
    match answer.recv_timeout(PATIENCE) {
        Ok(Ok((_, providers))) => Fact::Known(providers.into_iter().map(|provider| provider.name).collect()),
        Ok(Err(_)) => Fact::Absent,
        Err(RecvTimeoutError::Timeout) => {
            Fact::Unknown(format!("libfabric has not answered within {} s", PATIENCE.as_secs()))
        }
        Err(RecvTimeoutError::Disconnected) => Fact::Unknown("the query to libfabric failed".to_owned()),
    }
}
