//! What a provider demands, and how it misbehaves.

use std::ffi::{c_char, c_int};

use crate::sys;

/// One NIC of a provider. `fi_getinfo` lists the offers in the order in which they were made.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Offer {
    /// The provider's name.
    pub provider: *const c_char,
    /// The name of the NIC's domain.
    pub domain: *const c_char,
    /// The NIC's address, which `fi_getinfo` accepts as its node.
    pub node: *const c_char,
    /// What the NIC demands.
    pub settings: Settings,
}

/// What a NIC demands of its callers, what it offers, and how it behaves. The default demands nothing, and does
/// everything at once and in order.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Demands on registered memory: `FI_MR_LOCAL` and others.
    pub mr_mode: c_int,
    /// Demands of other kinds: `FI_CONTEXT2`, `FI_RX_CQ_DATA`.
    pub mode: u64,
    /// Capabilities that the NIC lacks.
    pub lacks: u64,
    /// The levels of completion that it offers, beyond the lowest one.
    pub completes: u64,
    /// Traffic class that it offers; 0: none.
    pub traffic_class: u32,
    /// Lists itself for every traffic class, with its own one.
    pub ignores_class: bool,
    /// Bytes of a key.
    pub key_size: usize,
    /// Bytes of an immediate.
    pub data_size: usize,
    /// Maximum number of bytes of one put.
    pub max_msg_size: usize,
    /// Number of puts that its queue holds.
    pub tx_size: usize,
    /// Number of receives that its queue holds.
    pub rx_size: usize,
    /// Maximum number of completions that a queue may hold.
    pub cq_size: usize,
    /// The only type of address vector that it has; 0: all.
    pub av_type: c_int,
    /// Addresses are strings of different lengths.
    pub text_addresses: bool,
    /// Refuses all addresses of peers.
    pub refuses_addresses: bool,
    /// `fi_cq_read` never returns, as behind a lock that a dead process holds.
    pub stuck: bool,
    /// The seed of all random decisions.
    pub seed: u64,
    /// Delivers and completes puts in any order.
    pub reorder: bool,
    /// Maximum number of bytes that it delivers at once, before the immediate; 0: any number.
    pub part: usize,
    /// Percent of turns in which nothing moves.
    pub late: u8,
    /// Percent of calls that return `-FI_EAGAIN`.
    pub again: u8,
    /// Attempts to deliver an immediate to a peer that has no posted receive, before the put fails.
    pub rnr_retries: u64,
    /// What happens to a put to an endpoint that is closed.
    pub gone: Gone,
    /// The call that fails; with `FI_MR_PROV_KEY`, `Step::Key` stands for a key that does not fit 64 bits.
    pub fail: Step,
    /// The error of this call.
    pub errno: c_int,
    /// The number of the put, from 1, whose completion is an error; 0: none.
    pub fail_put: u64,
    /// What the provider tells about the hardware.
    pub hardware: Hardware,
}

/// What a provider tells about the hardware of a NIC.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Hardware {
    /// Where the NIC is.
    pub bus: Bus,
    /// Bits per second of the link.
    pub speed: usize,
    /// Whether the link is down.
    pub is_down: bool,
    /// The network of the link.
    pub network: Network,
}

/// Where a NIC is.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Bus {
    /// The provider tells nothing of the hardware.
    #[default]
    Untold,
    /// On a bus of another kind.
    Other,
    /// At this bus number of PCI domain 0, device 0, function 0.
    Pci(u8),
}

/// The network of a link.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the names are those of the networks
pub enum Network {
    #[default]
    Unknown,
    Ethernet,
    InfiniBand,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mr_mode: 0,
            mode: 0,
            lacks: 0,
            completes: sys::DELIVERY_COMPLETE | sys::TRANSMIT_COMPLETE,
            traffic_class: 0,
            ignores_class: false,
            key_size: 8,
            data_size: 8,
            max_msg_size: 1 << 30,
            tx_size: 256,
            rx_size: 256,
            cq_size: 1 << 20,
            av_type: 0,
            text_addresses: false,
            refuses_addresses: false,
            stuck: false,
            seed: 0,
            reorder: false,
            part: 0,
            late: 0,
            again: 0,
            rnr_retries: u64::MAX,
            gone: Gone::Error,
            fail: Step::None,
            errno: 0,
            fail_put: 0,
            hardware: Hardware::default(),
        }
    }
}

/// What happens to a put to an endpoint that is closed.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// Its completion is an error, as with `verbs`.
    Error,
    /// It is never accepted, as with `net` of 1.17.
    Again,
    /// It completes without an effect, as with `shm` of 1.17.
    Silent,
}

/// A call that can fail.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // the names are those of the calls
pub enum Step {
    None,
    GetInfo,
    Fabric,
    Domain,
    CqOpen,
    AvOpen,
    Endpoint,
    BindCq,
    BindAv,
    Enable,
    MrReg,
    MrRegAttr,
    MrBind,
    MrEnable,
    Key,
    GetName,
    Recv,
    WriteData,
    CqRead,
    CqReadErr,
}
