//! [`Machine`]: which ranks can share memory, and which can reach each other's network addresses.

use std::fmt;
use std::str::FromStr;

/// The machine of a process, as the process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// The boot id, which tells machines apart. All containers of a machine see the same id.
    boot: String,
    /// The network namespace.
    network: String,
    /// The value of the setting [`Config::machine`](crate::Config::machine); empty if it is not set.
    label: String,
    /// The host name.
    name: String,
}

impl Machine {
    /// The machine of this process, with the setting [`Config::machine`](crate::Config::machine).
    ///
    /// A field that the system does not provide stays empty. Ranks on such systems count as ranks of one machine.
    pub fn this(label: Option<&str>) -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
        Self {
            boot: one_word(&boot),
            network: one_word(&network.to_string_lossy()),
            label: one_word(label.unwrap_or_default()),
            name: one_word(&rustix::system::uname().nodename().to_string_lossy()),
        }
    }

    /// Whether processes of both machines can share memory.
    pub fn shares_memory_with(&self, other: &Self) -> bool {
        self.shares_network_with(other) && self.label == other.label
    }

    /// Whether both machines have the same network interfaces, so that each reaches the loopback address of the other.
    pub fn shares_network_with(&self, other: &Self) -> bool {
        self.boot == other.boot && self.network == other.network
    }

    /// The name for messages: the setting if there is one, else the host name.
    pub fn name(&self) -> &str {
        if self.label.is_empty() { &self.name } else { &self.label }
    }
}

/// Removes white space and control characters, so that the text is one field of the text form.
fn one_word(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace() && !c.is_control()).collect()
}

/// The text form, from which [`FromStr`] makes an equal value.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { boot, network, label, name } = self;
        write!(f, "{boot} {network} {label} {name}")
    }
}

/// The error for a text that is not a [`Machine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the text form of a machine")]
pub struct NoMachine;

impl FromStr for Machine {
    type Err = NoMachine;

    fn from_str(text: &str) -> Result<Self, NoMachine> {
        let fields: Vec<&str> = text.split(' ').collect();
        let [boot, network, label, name] = fields[..] else { return Err(NoMachine) };
        // Another rank sent the text, and its names become part of error messages.
        let [boot, network, label, name] = [boot, network, label, name].map(one_word);
        Ok(Self { boot, network, label, name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "reads /proc")]
    fn a_machine_is_known_by_its_boot_its_network_and_its_label() {
        let this = Machine::this(None);
        assert!(this.shares_memory_with(&Machine::this(None)) && !this.name().is_empty());
        assert!(!this.boot.is_empty() && this.network.starts_with("net:"), "{this:?}");
        let labelled = Machine::this(Some("left half"));
        assert_eq!(labelled.name(), "lefthalf");
        assert!(!this.shares_memory_with(&labelled) && this.shares_network_with(&labelled));
        let elsewhere = Machine { network: "net:[1]".into(), ..this.clone() };
        assert!(!this.shares_memory_with(&elsewhere) && !this.shares_network_with(&elsewhere));
    }

    #[test]
    fn machines_survive_the_round_trip_as_text() {
        let [boot, network, name] = ["b", "net:[7]", "node-a"].map(String::from);
        for label in ["", "x"] {
            let machine = Machine {
                boot: boot.clone(),
                network: network.clone(),
                label: label.into(),
                name: name.clone(),
            };
            assert_eq!(machine.to_string().parse(), Ok(machine));
        }
        assert_eq!("a b c".parse::<Machine>(), Err(NoMachine));
        assert_eq!("a b c d\u{1b}[31m".parse::<Machine>().unwrap().name(), "c");
    }
}
