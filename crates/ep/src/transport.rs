//! The interface of an engine, which moves bytes along a rail between NVLink domains.
//!
//! An engine is made in two steps. First it is opened with this rank's [`Window`], which gives an [`Unconnected`] engine
//! and its blob: the bytes by which peers reach the window. The ranks exchange their blobs through the rendezvous. Then
//! [`Unconnected::connect`] takes the blobs of the whole rail and returns the [`Transport`].
//!
//! `docs/rails.md` describes the rules that follow from this interface for engines and for the layer above them.

use std::collections::HashSet;
#[cfg(target_os = "linux")]
use std::net::IpAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::str::FromStr;
use std::time::Instant;

use crate::error::{CallerError, Result};
#[cfg(target_os = "linux")]
use crate::join::{Rendezvous, address_of};
use crate::pace::Pace;
use crate::topology::Rank;

/// A signal: a word of [`BITS`](Self::BITS) bits that a peer receives after the bytes of a put.
///
/// Many networks deliver 32 bits with a put and do not name its sender. 17 bits belong to the layer above the engine,
/// and 15 bits are the index of the sender on the rail ([`Rail::immediate`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Signal(u32);

impl Signal {
    /// Bits of a signal.
    pub const BITS: u32 = 17;
    /// The greatest signal.
    pub const MAX: Self = Self((1 << Self::BITS) - 1);

    /// The signal with this word; `None` when it has more than [`BITS`](Self::BITS) bits.
    pub const fn new(word: u32) -> Option<Self> {
        if word <= Self::MAX.0 { Some(Self(word)) } else { None }
    }

    /// The word.
    pub const fn word(self) -> u32 {
        self.0
    }
}

/// The ranks of a rail, and which of them this rank is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rail {
    ranks: Vec<Rank>,
    own: usize,
}

impl Rail {
    /// Maximum number of ranks of a rail: the index of a rank has 15 bits.
    pub const MAX_RANKS: usize = 1 << (u32::BITS - Signal::BITS);

    /// The rail of `ranks`, by domain. This rank is the one in domain `own`.
    ///
    /// # Errors
    /// [`CallerError::Topology`] when a rank occurs twice, when there are more than [`MAX_RANKS`](Self::MAX_RANKS),
    /// or when domain `own` does not exist.
    pub fn new(ranks: Vec<Rank>, own: usize) -> Result<Self> {
        let problem = if ranks.len() > Self::MAX_RANKS {
            format!("a rail of {} ranks; at most {} are possible", ranks.len(), Self::MAX_RANKS)
        } else if own >= ranks.len() {
            format!("domain {own} does not exist on a rail of {} ranks", ranks.len())
        } else if ranks.iter().collect::<HashSet<_>>().len() < ranks.len() {
            "a rail that contains a rank twice".into()
        } else {
            return Ok(Self { ranks, own });
        };
        Err(CallerError::Topology(problem).into())
    }

    /// The ranks, by domain.
    pub fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// The index of this rank, which is its domain.
    pub fn own_index(&self) -> usize {
        self.own
    }

    /// This rank.
    pub fn own(&self) -> Rank {
        self.ranks[self.own]
    }

    /// The other ranks, by domain.
    pub fn peers(&self) -> impl Iterator<Item = Rank> + '_ {
        self.ranks.iter().copied().filter(|&rank| rank != self.own())
    }

    /// The index of another rank of the rail.
    ///
    /// # Errors
    /// [`CallerError::Topology`] for this rank itself, and for a rank of another rail.
    pub fn peer_index(&self, peer: Rank) -> Result<usize> {
        let found = self.ranks.iter().position(|&rank| rank == peer);
        found.filter(|&index| index != self.own).ok_or_else(|| {
            CallerError::Topology(format!("rank {peer} is not a rail peer of rank {}", self.own())).into()
        })
    }

    /// The 32 bits that carry a signal and its sender, this rank.
    pub fn immediate(&self, signal: Signal) -> u32 {
        (self.own as u32) << Signal::BITS | signal.0
    }

    /// The sender and the signal in these 32 bits; `None` when they name no peer.
    pub fn open_immediate(&self, immediate: u32) -> Option<(Rank, Signal)> {
        let sender = (immediate >> Signal::BITS) as usize;
        let rank = *self.ranks.get(sender).filter(|_| sender != self.own)?;
        Some((rank, Signal(immediate & Signal::MAX.0)))
    }
}

/// The engine that carries bytes between domains, and its options. All ranks use the same engine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransportOptions {
    /// `loopback`; `paced:` with a [`Pace`], such as `paced:25GB/s,5us`, on GPUs also `paced:25GB/s,5us,kernel`; or a provider
    /// of libfabric: `tcp`, `shm`, or another one by its name. Default `loopback`. `HYBRID_EP_TRANSPORT`.
    pub engine: String,
    /// This rank's network address, which selects its interface; `None`: the engine chooses, `tcp` 127.0.0.1.
    /// `HYBRID_EP_TRANSPORT_ADDRESS`.
    pub address: Option<String>,
    /// The NICs of this machine, one inner list per rank, by the names of their libfabric domains, such as `mlx5_0`
    /// (`fi_info` prints these names). The rank with local rank `i` uses the list at `i` modulo the number of lists. Empty:
    /// the NICs nearest to the rank's GPU; without a GPU, the provider's first NIC. All ranks of a job use the same number of
    /// NICs. `HYBRID_EP_TRANSPORT_NIC`: commas separate the lists, `+` separates the NICs of one list.
    pub nics: Vec<Vec<String>>,
    /// The traffic class of messages between domains; `None`: the provider's. `HYBRID_EP_TRANSPORT_TRAFFIC_CLASS`.
    pub traffic_class: Option<TrafficClass>,
    /// Whether the NIC accesses the rail lanes in the memory of the rank's GPU. `false`: lanes are in host memory, which the
    /// GPU accesses. `None`: in GPU memory if the provider and the GPU support it. Ranks may differ.
    /// `HYBRID_EP_TRANSPORT_GPU_MEMORY`: `0`, `1` or `auto`.
    pub gpu_memory: Option<bool>,
    /// The path of `libfabric.so.1`; `None`: the system's. `HYBRID_EP_LIBFABRIC`.
    pub libfabric: Option<PathBuf>,
}

impl Default for TransportOptions {
    fn default() -> Self {
        let engine = Self::LOOPBACK.into();
        let (nics, traffic_class) = (Vec::new(), None);
        Self { engine, address: None, nics, traffic_class, gpu_memory: None, libfabric: None }
    }
}

impl TransportOptions {
    /// The engine for ranks of one machine that needs no library.
    pub const LOOPBACK: &str = "loopback";
    /// The prefix of the names of engines that emulate a link between ranks of one machine. A [`Pace`] follows it.
    pub const PACED: &str = "paced:";

    /// The network address of this rank: that of the setting [`address`](Self::address), else the address from which this
    /// rank reaches `rendezvous`. `None` if neither exists.
    ///
    /// # Errors
    /// [`CallerError::Config`] for a setting that is neither an IP address nor an interface of this machine.
    #[cfg(target_os = "linux")]
    pub fn network_address(&self, rendezvous: &dyn Rendezvous) -> Result<Option<IpAddr>> {
        match &self.address {
            Some(setting) => address_of(setting).map(Some),
            None => Ok(rendezvous.network_address()),
        }
    }

    /// Whether the engine is [`LOOPBACK`](Self::LOOPBACK).
    pub fn is_loopback(&self) -> bool {
        self.engine == Self::LOOPBACK
    }

    /// Whether the engine copies between windows that the ranks of one machine map: `loopback`, or one that emulates a
    /// link.
    pub fn maps_windows(&self) -> bool {
        self.is_loopback() || self.engine.starts_with(Self::PACED)
    }

    /// The link that the engine emulates; `None` for an engine that emulates none.
    ///
    /// # Errors
    /// [`CallerError::Config`] when no [`Pace`] follows [`PACED`](Self::PACED).
    pub fn pace(&self) -> Result<Option<Pace>> {
        let Some(text) = self.engine.strip_prefix(Self::PACED) else { return Ok(None) };
        let (key, value) = ("HYBRID_EP_TRANSPORT", self.engine.clone());
        text.parse().map(Some).map_err(|problem| CallerError::Config { key, value, problem }.into())
    }

    /// The NICs of the rank with this local rank; empty: the engine chooses.
    pub fn nics_of(&self, local_rank: usize) -> &[String] {
        local_rank.checked_rem(self.nics.len()).map_or(&[], |index| &self.nics[index])
    }

    /// The number of NICs of a rank.
    pub fn nics_per_rank(&self) -> usize {
        self.nics.iter().map(Vec::len).max().unwrap_or(1)
    }

    /// A variable that is empty counts as not set.
    ///
    /// # Errors
    /// [`CallerError::Config`] for a list of NICs with an empty name, a name twice for one rank, or different numbers of NICs;
    /// for an unknown traffic class; for a choice of memory that is not `0`, `1` or `auto`; and for an emulated link without a
    /// valid pace.
    pub(crate) fn from_lookup(lookup: &impl Fn(&str) -> Option<String>) -> Result<Self> {
        let value = |key| lookup(key).map(|value| value.trim().to_string()).filter(|value| !value.is_empty());
        let nics = match value("HYBRID_EP_TRANSPORT_NIC") {
            None => Vec::new(),
            Some(list) => {
                let of_rank = |names: &str| names.split('+').map(|name| name.trim().to_string()).collect();
                let nics: Vec<Vec<String>> = list.split(',').map(of_rank).collect();
                let problem = if nics.iter().flatten().any(String::is_empty) {
                    "must be names of NICs, with a comma between those of two ranks and a + between those of one"
                } else if nics.iter().any(|names| names.len() != nics[0].len()) {
                    "must name the same number of NICs for each rank"
                } else if nics.iter().any(|names| names.iter().collect::<HashSet<_>>().len() < names.len()) {
                    "must not name a NIC twice for one rank"
                } else {
                    ""
                };
                if !problem.is_empty() {
                    let (key, problem) = ("HYBRID_EP_TRANSPORT_NIC", problem.into());
                    return Err(CallerError::Config { key, value: list, problem }.into());
                }
                nics
            }
        };
        let class = |text: String| {
            let key = "HYBRID_EP_TRANSPORT_TRAFFIC_CLASS";
            text.parse().map_err(|problem| CallerError::Config { key, value: text, problem })
        };
        let options = Self {
            engine: value("HYBRID_EP_TRANSPORT").unwrap_or_else(|| Self::LOOPBACK.into()),
            address: value("HYBRID_EP_TRANSPORT_ADDRESS"),
            nics,
            traffic_class: value("HYBRID_EP_TRANSPORT_TRAFFIC_CLASS").map(class).transpose()?,
            gpu_memory: match value("HYBRID_EP_TRANSPORT_GPU_MEMORY") {
                None => None,
                Some(text) => match &*text {
                    "auto" => None,
                    "0" => Some(false),
                    "1" => Some(true),
                    _ => {
                        let (key, problem) =
                            ("HYBRID_EP_TRANSPORT_GPU_MEMORY", "must be 0, 1 or auto".into());
                        return Err(CallerError::Config { key, value: text, problem }.into());
                    }
                },
            },
            libfabric: value("HYBRID_EP_LIBFABRIC").map(PathBuf::from),
        };
        options.pace()?;
        Ok(options)
    }
}

/// A class of traffic, by which the NICs and switches of a network may treat messages differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TrafficClass {
    /// The code point of differentiated services (DSCP) in the packets, below [`DSCPS`](Self::DSCPS).
    Dscp(u8),
    /// Best effort.
    BestEffort,
    /// Short delay.
    LowLatency,
    /// Capacity that is reserved for this class.
    DedicatedAccess,
    /// High throughput.
    BulkData,
    /// Only capacity that no other class uses.
    Scavenger,
}

impl TrafficClass {
    /// Number of code points.
    pub const DSCPS: u8 = 64;
}

impl FromStr for TrafficClass {
    type Err = String;

    /// Reads a code point, or a name such as `low-latency`. The error says which texts are valid.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        Ok(match text {
            "best-effort" => Self::BestEffort,
            "low-latency" => Self::LowLatency,
            "dedicated-access" => Self::DedicatedAccess,
            "bulk-data" => Self::BulkData,
            "scavenger" => Self::Scavenger,
            text => match text.parse() {
                Ok(dscp) if dscp < Self::DSCPS => Self::Dscp(dscp),
                _ => {
                    let names = "best-effort, low-latency, dedicated-access, bulk-data or scavenger";
                    return Err(format!("must be a DSCP from 0 to {}, {names}", Self::DSCPS - 1));
                }
            },
        })
    }
}

/// The part of a window that is in the memory of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuPart {
    /// CUDA's ordinal of the GPU.
    pub gpu: i32,
    /// Address of the first byte in the address space of CUDA and of this process.
    pub address: u64,
    /// Length, bytes.
    pub len: usize,
}

impl GpuPart {
    /// The hint of errors where the network cannot access the memory of a GPU: what to do.
    pub const HINT: &str = "set HYBRID_EP_TRANSPORT_GPU_MEMORY=0, which sends through host memory";
}

/// This rank's memory that an engine registers: peers' puts write to it, and this rank's puts read from it.
///
/// A window is host memory. A part in the memory of a GPU may follow it: the offset of the first byte of that part is the
/// length of the part in host memory. No put crosses from one part to the other, neither with its source nor with its
/// destination. The windows of a rail may have different lengths and parts.
///
/// What the functions return must not change. The memory must stay mapped until the window is dropped; an engine keeps the
/// window as long as the network may access it.
pub trait Window: Send + Sync {
    /// The address of the first byte, which is in host memory.
    fn start(&self) -> NonNull<u8>;

    /// Length of the part in host memory, bytes.
    fn len(&self) -> usize;

    /// Whether the part in host memory has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The part in the memory of a GPU; `None` if the window has none, which is the default.
    fn gpu_part(&self) -> Option<GpuPart> {
        None
    }
}

/// The limits that the layer above the engine keeps. An engine sizes its queues by these limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of signals in flight from one rank to another: posted, but not yet passed to the peer's `on_signal`.
    pub signals: usize,
    /// Maximum number of bytes of one put.
    pub put_bytes: usize,
    /// Which settings the user can lower if the engine does not support these limits. The engine's errors quote this text.
    pub advice: &'static str,
}

/// An engine that is opened with this rank's window and does not know its peers yet.
pub trait Unconnected: Send {
    /// The bytes that every peer needs to reach this rank's window. Only members of the job should see them.
    fn blob(&self) -> Vec<u8>;

    /// Connects the engine with the peers. `blobs` are those of all ranks of the rail, by domain. Does not wait for a
    /// peer.
    ///
    /// # Errors
    /// [`PeerError`](crate::PeerError) that names the peer whose blob cannot be used; an environment error of the
    /// engine.
    fn connect(self: Box<Self>, blobs: &[Vec<u8>]) -> Result<Box<dyn Transport>>;
}

/// Whether the engine accepted a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posted {
    /// The engine accepted the put.
    Yes,
    /// The engine's queue is full: call [`Transport::poll`], then post the put again.
    Full,
}

/// A put: copies bytes from this rank's window to a peer's window, then delivers a signal to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Put {
    /// Receiving rank, on the same rail.
    pub peer: Rank,
    /// Offset of the first byte in this rank's window.
    pub source: usize,
    /// Offset of the first byte in the peer's window.
    pub destination: usize,
    /// Number of bytes; 0 sends only the signal, and the offsets do not matter.
    pub len: usize,
    /// The signal that the peer's [`Transport::poll`] delivers once the bytes are in its window.
    pub signal: Signal,
}

impl Put {
    /// A put of no bytes, which delivers only `signal`.
    pub fn new(peer: Rank, signal: Signal) -> Self {
        Self { peer, source: 0, destination: 0, len: 0, signal }
    }

    /// Sets the bytes: the range `source` of this rank's window is copied to the offset `destination` of the peer's
    /// window.
    #[must_use]
    pub fn bytes(self, source: Range<usize>, destination: usize) -> Self {
        Self { source: source.start, destination, len: source.len(), ..self }
    }
}

/// An engine that moves bytes along a rail, between NVLink domains.
///
/// Puts address windows by byte offset. The only ordering guarantee is that a put's signal arrives after the put's
/// bytes. Signals of different puts may arrive in any order. The caller must keep the source bytes unchanged until the
/// peer has received them, which the caller learns from the peer's signals. The caller must not exceed its [`Limits`].
///
/// Any thread may call any method at any time; no method blocks, except [`drain`](Self::drain) until its deadline. An
/// accepted put arrives without further calls, as long as both engines exist. Dropping an engine cancels the puts that
/// have not left this rank.
///
/// If a peer is gone, every put to it returns an error, and `poll` returns the error once. The other peers stay reachable, so
/// the caller decides whether it still needs the peer that the error names.
pub trait Transport: Send + Sync {
    /// The engine's name, for reports.
    fn name(&self) -> &str;

    /// Posts a put.
    ///
    /// # Errors
    /// [`CallerError`] when the put lies outside a window, or its peer is not on the rail; an engine may also refuse a put
    /// longer than [`Limits::put_bytes`]; [`PeerError`](crate::PeerError) when the peer is gone; an environment error of the
    /// engine.
    fn put(&self, put: Put) -> Result<Posted>;

    /// The address of `len` bytes at `offset` of a peer's window, for an engine that maps both windows in this process.
    ///
    /// The caller writes the bytes itself and then posts a put of length 0 for the signal. `None` when only the engine
    /// can write to the peer's window, as with a network card; this is the default.
    fn lend(&self, peer: Rank, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let _ = (peer, offset, len);
        None
    }

    /// Makes progress, and passes every signal that has arrived to `on_signal`, with the rank that sent it. Passes no
    /// signal while another thread polls. `on_signal` must not call the engine.
    ///
    /// # Errors
    /// [`PeerError`](crate::PeerError), once for each peer that is gone; an environment error of the engine. Signals
    /// that have arrived are passed first.
    fn poll(&self, on_signal: &mut dyn FnMut(Rank, Signal)) -> Result<()>;

    /// Waits until all puts to `peer` that this rank has posted are complete: they have left this rank, and dropping the
    /// engine does not cancel them. Signals that arrive meanwhile are kept for [`poll`](Self::poll).
    ///
    /// # Errors
    /// [`PeerError`](crate::PeerError) that names `peer` when it is gone or the deadline has passed; [`CallerError`]
    /// when `peer` is not on the rail; an environment error of the engine.
    fn drain(&self, peer: Rank, deadline: Instant) -> Result<()>;

    /// The CPUs near the engine's network card, for threads that call the engine continuously
    /// ([`stay_near`](crate::affinity::stay_near)). Empty if there is no card, or if its CPUs are unknown; this is the
    /// default.
    fn near_cpus(&self) -> &[usize] {
        &[]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immediates_carry_a_signal_and_its_sender() {
        let ranks = vec![Rank(4), Rank(9), Rank(2)];
        let rail = |own| Rail::new(ranks.clone(), own).unwrap();
        for (own, signal) in [(0, 0), (1, 7), (2, Signal::MAX.word())] {
            let signal = Signal::new(signal).unwrap();
            let immediate = rail(own).immediate(signal);
            for other in (0..3).filter(|&other| other != own) {
                assert_eq!(rail(other).open_immediate(immediate), Some((ranks[own], signal)));
            }
            assert_eq!(rail(own).open_immediate(immediate), None, "a rank sends itself nothing");
        }
        assert_eq!(rail(0).open_immediate(3 << Signal::BITS), None);
        assert_eq!(rail(0).open_immediate(u32::MAX), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "a table of 32,768 ranks: minutes")]
    fn the_last_rank_of_the_longest_rail_has_an_immediate_of_its_own() {
        let ranks: Vec<Rank> = (0..Rail::MAX_RANKS as u32).map(Rank).collect();
        let last = Rail::new(ranks.clone(), Rail::MAX_RANKS - 1).unwrap();
        let first = Rail::new(ranks.clone(), 0).unwrap();
        let sent = last.immediate(Signal::MAX);
        assert_eq!(first.open_immediate(sent), Some((Rank(Rail::MAX_RANKS as u32 - 1), Signal::MAX)));
        let ranks = (0..=Rail::MAX_RANKS as u32).map(Rank).collect();
        assert!(Rail::new(ranks, 0).unwrap_err().to_string().contains("at most 32768"));
    }

    #[test]
    fn the_environment_selects_the_engine() {
        let lookup = |pairs: &'static [(&str, &str)]| {
            let value = move |key: &str| pairs.iter().find(|(k, _)| *k == key).map(|(_, v)| v.to_string());
            TransportOptions::from_lookup(&value)
        };
        let read = |pairs| lookup(pairs).unwrap();
        assert!(read(&[]).is_loopback() && read(&[("HYBRID_EP_TRANSPORT", " ")]).is_loopback());
        let found = read(&[("HYBRID_EP_TRANSPORT", "tcp"), ("HYBRID_EP_TRANSPORT_ADDRESS", "10.0.0.1")]);
        assert_eq!((found.engine.as_str(), found.address.as_deref()), ("tcp", Some("10.0.0.1")));
        assert_eq!(read(&[("HYBRID_EP_LIBFABRIC", "/l")]).libfabric, Some("/l".into()));
    }

    #[test]
    fn the_local_rank_selects_its_nics() {
        let read = |list: &'static str| {
            TransportOptions::from_lookup(&|key| (key == "HYBRID_EP_TRANSPORT_NIC").then(|| list.to_string()))
        };
        let nics = |list| {
            let options = read(list).unwrap();
            [0, 1, 2, 5].map(|local_rank| options.nics_of(local_rank).join(" "))
        };
        assert_eq!(nics(" "), [""; 4]);
        assert_eq!(nics(" mlx5_0 "), ["mlx5_0"; 4]);
        assert_eq!(nics("mlx5_0, mlx5_1"), ["mlx5_0", "mlx5_1", "mlx5_0", "mlx5_1"]);
        let pairs = ["mlx5_0 mlx5_1", "mlx5_2 mlx5_3", "mlx5_0 mlx5_1", "mlx5_2 mlx5_3"];
        assert_eq!(nics("mlx5_0 + mlx5_1,mlx5_2+mlx5_3"), pairs);
        let per_rank = |list| read(list).unwrap().nics_per_rank();
        assert_eq!(["", "a", "a,b", "a+b,c+d"].map(per_rank), [1, 1, 1, 2]);
        for (wrong, part) in [
            ("mlx5_0,,mlx5_1", "with a comma between"),
            ("mlx5_0+", "with a comma between"),
            ("mlx5_0+mlx5_1,mlx5_2", "the same number of NICs for each rank"),
            ("mlx5_0+mlx5_0", "must not name a NIC twice"),
        ] {
            let text = read(wrong).unwrap_err().to_string();
            assert!(text.starts_with("HYBRID_EP_TRANSPORT_NIC") && text.contains(part), "{wrong}: {text}");
        }
    }

    #[test]
    fn an_engine_may_emulate_a_link() {
        let lookup = |engine: &'static str| {
            TransportOptions::from_lookup(&|key| (key == "HYBRID_EP_TRANSPORT").then(|| engine.to_string()))
        };
        let kind = |engine| {
            let options = lookup(engine).unwrap();
            (options.is_loopback(), options.maps_windows(), options.pace().unwrap().is_some())
        };
        assert_eq!(kind("loopback"), (true, true, false));
        assert_eq!(kind("paced:25GB/s,5us"), (false, true, true));
        assert_eq!(kind("tcp"), (false, false, false));
        let error = lookup("paced:25").unwrap_err().to_string();
        assert!(error.contains("HYBRID_EP_TRANSPORT") && error.contains("such as 25GB/s,5us"), "{error}");
    }

    #[test]
    fn lanes_may_be_in_gpu_memory() {
        let read = |value: &'static str| {
            let lookup = |key: &str| (key == "HYBRID_EP_TRANSPORT_GPU_MEMORY").then(|| value.to_string());
            TransportOptions::from_lookup(&lookup).map(|options| options.gpu_memory)
        };
        assert_eq!(
            ["", "auto", "0", " 1 "].map(|value| read(value).unwrap()),
            [None, None, Some(false), Some(true)]
        );
        let error = read("yes").unwrap_err().to_string();
        assert!(
            error.contains("HYBRID_EP_TRANSPORT_GPU_MEMORY") && error.contains("0, 1 or auto"),
            "{error}"
        );
    }

    #[test]
    fn traffic_classes_are_code_points_and_names() {
        assert_eq!("46".parse(), Ok(TrafficClass::Dscp(46)));
        assert_eq!("low-latency".parse(), Ok(TrafficClass::LowLatency));
        for wrong in ["64", "-1", "fast", "Low-Latency"] {
            let lookup = |key: &str| (key == "HYBRID_EP_TRANSPORT_TRAFFIC_CLASS").then(|| wrong.to_string());
            let text = TransportOptions::from_lookup(&lookup).unwrap_err().to_string();
            assert!(
                text.contains(wrong) && text.contains("from 0 to 63, best-effort, low-latency"),
                "{text}"
            );
        }
    }

    #[test]
    fn signals_of_more_bits_and_invalid_rails_are_refused() {
        assert_eq!(Signal::new(1 << 17), None);
        assert_eq!(Signal::new((1 << 17) - 1), Some(Signal::MAX));
        assert!(Rail::new(vec![Rank(0), Rank(0)], 0).is_err());
        assert!(Rail::new(vec![Rank(0)], 1).is_err());
        let rail = Rail::new(vec![Rank(0), Rank(3)], 1).unwrap();
        assert_eq!((rail.own(), rail.peers().collect::<Vec<_>>()), (Rank(3), vec![Rank(0)]));
        assert_eq!(rail.peer_index(Rank(0)), Ok(0));
        for wrong in [Rank(3), Rank(1)] {
            assert!(rail.peer_index(wrong).unwrap_err().to_string().contains("not a rail peer of rank 3"));
        }
    }
}
