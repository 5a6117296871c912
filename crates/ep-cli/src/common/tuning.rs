//! Options for settings of the library, shared by the commands that run operators.

use std::time::Duration;

use clap::Args;
use ep::{CallerError, Config};

use crate::common::numbers::{Count, count64};

/// `--timeout-ms` and `--stall-timeout-ms`: up to one day, as in the library's `Config`.
const WAIT_MS: Count = Count::new(1, 86_400_000);

/// Settings of the library that have an option. The library's environment variables set these and all others.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Tuning")]
pub(crate) struct TuningArgs {
    /// Longest wait in milliseconds for a live rank to join or to enter an operator [default: HYBRID_EP_TIMEOUT_MS, or
    /// 600000]
    #[arg(long, value_name = "MS", value_parser = count64(WAIT_MS))]
    pub(crate) timeout_ms: Option<u64>,
    /// Longest wait in milliseconds for a rank that makes no progress inside an operator; --timeout-ms applies if it is
    /// shorter [default: HYBRID_EP_STALL_TIMEOUT_MS, or 30000]
    #[arg(long, value_name = "MS", value_parser = count64(WAIT_MS))]
    pub(crate) stall_timeout_ms: Option<u64>,
    /// Worker threads of each rank; 0 = the rank's share of the cores [default: HYBRID_EP_WORKERS, or 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=256))]
    pub(crate) workers: Option<u16>,
    /// SMs of each GPU for dispatch and combine; `bench` measures each number of a list such as 8,16,32 [default:
    /// HYBRID_EP_SMS; or 48 for one or two ranks in one domain, else 32]
    #[arg(
        long,
        value_name = "N",
        action = clap::ArgAction::Set,
        value_delimiter = ',',
        value_parser = clap::value_parser!(u16).range(1..=1024)
    )]
    pub(crate) sms: Vec<u16>,
    /// What carries bytes between domains: loopback; paced:25GB/s,5us, an emulated link of that bandwidth and latency, on
    /// GPUs also paced:25GB/s,5us,kernel; or a provider of libfabric such as tcp or shm [default: HYBRID_EP_TRANSPORT, or loopback]
    #[arg(long, value_name = "NAME")]
    pub(crate) transport: Option<String>,
    /// Set by the launcher for the ranks that it starts: stdin is a pipe that closes when the launcher ends.
    #[arg(long, hide = true)]
    pub(crate) launched: bool,
}

impl TuningArgs {
    /// The library's settings: defaults, then its environment variables, then options.
    ///
    /// # Errors
    /// Several numbers of SMs; see [`Self::configs`].
    pub(crate) fn config(&self) -> ep::Result<Config> {
        if self.sms.len() > 1 {
            return Err(self.one_number_of_sms("this command takes one number; only `bench` takes several"));
        }
        self.with_sms(self.sms.first().copied())
    }

    /// The settings for each number of SMs; at least one.
    pub(crate) fn configs(&self) -> ep::Result<Vec<Config>> {
        match &self.sms[..] {
            [] => Ok(vec![self.with_sms(None)?]),
            several => several.iter().map(|&sms| self.with_sms(Some(sms))).collect(),
        }
    }

    /// The error for several numbers of SMs where only one is possible.
    pub(crate) fn one_number_of_sms(&self, problem: &str) -> ep::Error {
        let value = self.sms.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        CallerError::Config { key: "--sms", value, problem: problem.into() }.into()
    }

    fn with_sms(&self, sms: Option<u16>) -> ep::Result<Config> {
        let mut config = Config::from_env()?;
        if let Some(timeout) = self.timeout_ms {
            config.timeout = Duration::from_millis(timeout);
        }
        if let Some(stall_timeout) = self.stall_timeout_ms {
            config.stall_timeout = Duration::from_millis(stall_timeout);
        }
        if let Some(workers) = self.workers {
            config.host.workers = workers.into();
        }
        if let Some(sms) = sms {
            config.cuda.sms = sms.into();
        }
        if let Some(transport) = &self.transport {
            config.host.transport.engine.clone_from(transport);
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    #[command(no_binary_name = true)]
    struct Options {
        #[command(flatten)]
        tuning: TuningArgs,
    }

    fn parse(options: &[&str]) -> TuningArgs {
        <Options as clap::Parser>::try_parse_from(options).unwrap().tuning
    }

    #[test]
    fn several_numbers_of_sms_give_several_settings_and_never_one() {
        let sms = |config: &Config| config.cuda.sms;
        let several = parse(&["--sms", "8,32,16"]);
        assert_eq!(several.configs().unwrap().iter().map(sms).collect::<Vec<_>>(), [8, 32, 16]);
        let refused = several.config().unwrap_err().to_string();
        assert!(refused.contains("--sms = 8,32,16: this command takes one number"), "{refused}");
        let one = parse(&["--sms", "24"]);
        assert_eq!(sms(&one.config().unwrap()), 24);
        assert_eq!(one.configs().unwrap().iter().map(sms).collect::<Vec<_>>(), [24]);
        let none = parse(&[]);
        assert_eq!(none.configs().unwrap(), [none.config().unwrap()]);
    }
}
