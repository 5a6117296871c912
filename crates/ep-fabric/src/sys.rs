//! The part of libfabric's C interface that this crate uses, declared by hand for version 1.17.
//!
//! The library allocates most of these structures, and later versions only append fields to them, so the fields that are
//! declared suffice. `tests/layout.rs` compares all offsets with the headers of an installed libfabric.

use std::ffi::{c_char, c_int, c_void};

/// A function that this crate does not call. It keeps the place of its pointer.
pub type Unused = Option<unsafe extern "C" fn()>;

/// An address in an address vector.
pub type Address = u64;

pub const fn version(major: u32, minor: u32) -> u32 {
    major << 16 | minor
}

pub const MSG: u64 = 1 << 1;
pub const RMA: u64 = 1 << 2;
pub const WRITE: u64 = 1 << 9;
pub const RECV: u64 = 1 << 10;
pub const SEND: u64 = 1 << 11;
pub const TRANSMIT: u64 = SEND;
pub const REMOTE_WRITE: u64 = 1 << 13;
pub const REMOTE_CQ_DATA: u64 = 1 << 17;
pub const TRANSMIT_COMPLETE: u64 = 1 << 27;
pub const DELIVERY_COMPLETE: u64 = 1 << 28;
/// Memory of devices.
pub const HMEM: u64 = 1 << 47;
/// A flag of `fi_getinfo`: the node is the address of this end.
pub const SOURCE: u64 = 1 << 57;

/// Modes: what the provider demands of the caller.
pub const CONTEXT: u64 = 1 << 59;
pub const RX_CQ_DATA: u64 = 1 << 56;
pub const CONTEXT2: u64 = 1 << 52;

pub const MR_LOCAL: c_int = 1 << 2;
pub const MR_VIRT_ADDR: c_int = 1 << 4;
pub const MR_ALLOCATED: c_int = 1 << 5;
pub const MR_PROV_KEY: c_int = 1 << 6;
pub const MR_ENDPOINT: c_int = 1 << 9;
pub const MR_HMEM: c_int = 1 << 10;

pub const HMEM_CUDA: c_int = 1;

/// The key of a region whose real key does not fit 64 bits or is not known yet.
pub const KEY_NOTAVAIL: u64 = u64::MAX;

/// Traffic classes: a code point (DSCP) in the low byte, or a label.
pub const TC_DSCP: u32 = 0x100;
pub const TC_BEST_EFFORT: u32 = 0x200;
pub const TC_LOW_LATENCY: u32 = 0x201;
pub const TC_DEDICATED_ACCESS: u32 = 0x202;
pub const TC_BULK_DATA: u32 = 0x203;
pub const TC_SCAVENGER: u32 = 0x204;

/// An address that is a string.
pub const ADDR_STR: u32 = 9;
pub const AV_MAP: c_int = 1;
pub const AV_TABLE: c_int = 2;
pub const EP_RDM: c_int = 3;
pub const BUS_PCI: c_int = 1;
pub const LINK_DOWN: c_int = 1;
pub const THREAD_DOMAIN: c_int = 3;
pub const CQ_FORMAT_DATA: c_int = 3;
pub const WAIT_NONE: c_int = 0;
/// Command of `control` that enables an endpoint or a memory region.
pub const ENABLE: c_int = 6;

pub const EAGAIN: isize = 11;
pub const ENOMEM: isize = 12;
pub const EACCES: isize = 13;
pub const EINVAL: isize = 22;
pub const ENFILE: isize = 23;
pub const EMFILE: isize = 24;
pub const ENOSYS: isize = 38;
pub const ENODATA: isize = 61;
pub const EMSGSIZE: isize = 90;
pub const EOPNOTSUPP: isize = 95;
pub const ENOBUFS: isize = 105;
/// `fi_cq_read`: an error entry is available.
pub const EAVAIL: isize = 259;

#[repr(C)]
pub struct Info {
    pub next: *mut Info,
    pub caps: u64,
    pub mode: u64,
    pub addr_format: u32,
    pub src_addrlen: usize,
    pub dest_addrlen: usize,
    pub src_addr: *mut c_void,
    pub dest_addr: *mut c_void,
    pub handle: *mut Fid,
    pub tx_attr: *mut TxAttr,
    pub rx_attr: *mut RxAttr,
    pub ep_attr: *mut EpAttr,
    pub domain_attr: *mut DomainAttr,
    pub fabric_attr: *mut FabricAttr,
    /// Null where the provider does not describe the NIC.
    pub nic: *mut NicInfo,
}

#[repr(C)]
pub struct TxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
    pub tclass: u32,
}

#[repr(C)]
pub struct RxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub total_buffered_recv: usize,
    pub size: usize,
}

#[repr(C)]
pub struct EpAttr {
    pub kind: c_int,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
}

#[repr(C)]
pub struct DomainAttr {
    pub domain: *mut Domain,
    pub name: *mut c_char,
    pub threading: c_int,
    pub control_progress: c_int,
    pub data_progress: c_int,
    pub resource_mgmt: c_int,
    pub av_type: c_int,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
    pub cq_data_size: usize,
}

#[repr(C)]
pub struct FabricAttr {
    pub fabric: *mut Fabric,
    pub name: *mut c_char,
    pub prov_name: *mut c_char,
    pub prov_version: u32,
    pub api_version: u32,
}

/// The hardware of a NIC. Every pointer may be null.
#[repr(C)]
pub struct NicInfo {
    pub fid: Fid,
    pub device_attr: *mut c_void,
    pub bus_attr: *mut BusAttr,
    pub link_attr: *mut LinkAttr,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct BusAttr {
    pub kind: c_int,
    /// Valid for [`BUS_PCI`].
    pub pci: PciAttr,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct PciAttr {
    pub domain: u16,
    pub bus: u8,
    pub device: u8,
    pub function: u8,
}

#[repr(C)]
pub struct LinkAttr {
    pub address: *mut c_char,
    pub mtu: usize,
    /// Bits per second.
    pub speed: usize,
    pub state: c_int,
    pub network_type: *mut c_char,
}

/// The head of every object.
#[repr(C)]
pub struct Fid {
    pub class: usize,
    pub context: *mut c_void,
    pub ops: *mut Ops,
}

#[repr(C)]
pub struct Ops {
    pub size: usize,
    pub close: Option<unsafe extern "C" fn(*mut Fid) -> c_int>,
    pub bind: Option<unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int>,
    pub control: Option<unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int>,
}

#[repr(C)]
pub struct Fabric {
    pub fid: Fid,
    pub ops: *mut FabricOps,
}

#[repr(C)]
pub struct FabricOps {
    pub size: usize,
    pub domain: Option<unsafe extern "C" fn(*mut Fabric, *mut Info, *mut *mut Domain, *mut c_void) -> c_int>,
}

#[repr(C)]
pub struct Domain {
    pub fid: Fid,
    pub ops: *mut DomainOps,
    pub mr: *mut MrOps,
}

#[repr(C)]
pub struct DomainOps {
    pub size: usize,
    pub av_open: Option<unsafe extern "C" fn(*mut Domain, *mut AvAttr, *mut *mut Av, *mut c_void) -> c_int>,
    pub cq_open: Option<unsafe extern "C" fn(*mut Domain, *mut CqAttr, *mut *mut Cq, *mut c_void) -> c_int>,
    pub endpoint: Option<unsafe extern "C" fn(*mut Domain, *mut Info, *mut *mut Ep, *mut c_void) -> c_int>,
}

#[repr(C)]
pub struct MrOps {
    pub size: usize,
    /// Domain, buffer, length, access, offset, requested key, flags, result, context.
    #[allow(clippy::type_complexity)] // as in C
    pub reg: Option<
        unsafe extern "C" fn(
            *mut Fid,
            *const c_void,
            usize,
            u64,
            u64,
            u64,
            u64,
            *mut *mut Mr,
            *mut c_void,
        ) -> c_int,
    >,
    pub regv: Unused,
    /// Domain, attributes, flags, result.
    pub regattr: Option<unsafe extern "C" fn(*mut Fid, *const MrAttr, u64, *mut *mut Mr) -> c_int>,
}

#[repr(C)]
pub struct Iovec {
    pub base: *mut c_void,
    pub len: usize,
}

#[repr(C)]
pub struct MrAttr {
    pub mr_iov: *const Iovec,
    pub iov_count: usize,
    pub access: u64,
    pub offset: u64,
    pub requested_key: u64,
    pub context: *mut c_void,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
    pub iface: c_int,
    pub device: MrDevice,
    /// The caller allocates this structure, so it has room for the fields of later versions.
    pub later: [u64; 8],
}

#[repr(C)]
pub union MrDevice {
    pub reserved: u64,
    pub cuda: c_int,
}

#[repr(C)]
pub struct Mr {
    pub fid: Fid,
    pub desc: *mut c_void,
    pub key: u64,
}

#[repr(C)]
pub struct AvAttr {
    pub kind: c_int,
    pub rx_ctx_bits: c_int,
    pub count: usize,
    pub ep_per_node: usize,
    pub name: *const c_char,
    pub map_addr: *mut c_void,
    pub flags: u64,
}

#[repr(C)]
pub struct Av {
    pub fid: Fid,
    pub ops: *mut AvOps,
}

#[repr(C)]
pub struct AvOps {
    pub size: usize,
    pub insert:
        Option<unsafe extern "C" fn(*mut Av, *const c_void, usize, *mut Address, u64, *mut c_void) -> c_int>,
}

#[repr(C)]
pub struct CqAttr {
    pub size: usize,
    pub flags: u64,
    pub format: c_int,
    pub wait_obj: c_int,
    pub signaling_vector: c_int,
    pub wait_cond: c_int,
    pub wait_set: *mut c_void,
}

#[repr(C)]
pub struct Cq {
    pub fid: Fid,
    pub ops: *mut CqOps,
}

#[repr(C)]
pub struct CqOps {
    pub size: usize,
    pub read: Option<unsafe extern "C" fn(*mut Cq, *mut c_void, usize) -> isize>,
    pub readfrom: Unused,
    pub readerr: Option<unsafe extern "C" fn(*mut Cq, *mut CqErrEntry, u64) -> isize>,
}

/// A completion in the format `FI_CQ_FORMAT_DATA`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CqDataEntry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
}

#[repr(C)]
pub struct CqErrEntry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
    /// The caller allocates this structure, so it has room for the fields of later versions.
    pub later: [u64; 8],
}

#[repr(C)]
pub struct Ep {
    pub fid: Fid,
    pub ops: *mut c_void,
    pub cm: *mut CmOps,
    pub msg: *mut MsgOps,
    pub rma: *mut RmaOps,
}

#[repr(C)]
pub struct CmOps {
    pub size: usize,
    pub setname: Unused,
    pub getname: Option<unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int>,
}

#[repr(C)]
pub struct MsgOps {
    pub size: usize,
    /// Endpoint, buffer, length, descriptor, source, context.
    pub recv:
        Option<unsafe extern "C" fn(*mut Ep, *mut c_void, usize, *mut c_void, Address, *mut c_void) -> isize>,
}

#[repr(C)]
pub struct RmaOps {
    pub size: usize,
    pub read: [Unused; 3],
    pub write: [Unused; 4],
    /// Endpoint, buffer, length, descriptor, immediate, destination, remote address, key, context.
    #[allow(clippy::type_complexity)] // as in C
    pub writedata: Option<
        unsafe extern "C" fn(
            *mut Ep,
            *const c_void,
            usize,
            *mut c_void,
            u64,
            Address,
            u64,
            u64,
            *mut c_void,
        ) -> isize,
    >,
}

pub type GetInfo =
    unsafe extern "C" fn(u32, *const c_char, *const c_char, u64, *const Info, *mut *mut Info) -> c_int;
pub type FreeInfo = unsafe extern "C" fn(*mut Info);
pub type DupInfo = unsafe extern "C" fn(*const Info) -> *mut Info;
pub type OpenFabric = unsafe extern "C" fn(*mut FabricAttr, *mut *mut Fabric, *mut c_void) -> c_int;
pub type Version = unsafe extern "C" fn() -> u32;
pub type StrError = unsafe extern "C" fn(c_int) -> *const c_char;
