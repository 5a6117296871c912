//! The declarations of `src/sys.rs` against the headers of an installed libfabric: a C program prints the offsets.
//! Skipped, with a message, where there are no headers or no C compiler; `HYBRID_EP_LIBFABRIC_INCLUDE` names another
//! directory of headers.
#![allow(clippy::unwrap_used)] // in helpers of tests

#[path = "../src/sys.rs"]
#[allow(dead_code, missing_docs, unreachable_pub)]
mod sys;

use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

/// An expression of C and its value in `sys`.
struct Expected(String, u64);

macro_rules! fields {
    ($list:ident, $rust:ident, $c:literal: $($field:ident $(= $name:literal)?),+) => {
        $(
            let name = concat!($($name,)? "");
            let name = if name.is_empty() { stringify!($field) } else { name };
            $list.push(Expected(format!("offsetof({}, {name})", $c), offset_of!(sys::$rust, $field) as u64));
        )+
    };
}

fn expected() -> Vec<Expected> {
    let mut list = Vec::new();
    fields!(list, Info, "struct fi_info": next, caps, mode, addr_format, src_addrlen, dest_addrlen, src_addr, dest_addr, handle, tx_attr, rx_attr, ep_attr, domain_attr, fabric_attr, nic);
    fields!(list, TxAttr, "struct fi_tx_attr": caps, mode, op_flags, msg_order, comp_order, inject_size, size, iov_limit, rma_iov_limit, tclass);
    fields!(list, RxAttr, "struct fi_rx_attr": caps, mode, op_flags, msg_order, comp_order, total_buffered_recv, size);
    fields!(list, EpAttr, "struct fi_ep_attr": kind = "type", protocol, protocol_version, max_msg_size);
    fields!(list, DomainAttr, "struct fi_domain_attr": domain, name, threading, control_progress, data_progress, resource_mgmt, av_type, mr_mode, mr_key_size, cq_data_size);
    fields!(list, FabricAttr, "struct fi_fabric_attr": fabric, name, prov_name, prov_version, api_version);
    fields!(list, NicInfo, "struct fid_nic": fid, device_attr, bus_attr, link_attr);
    fields!(list, BusAttr, "struct fi_bus_attr": kind = "bus_type", pci = "attr.pci");
    fields!(list, PciAttr, "struct fi_pci_attr": domain = "domain_id", bus = "bus_id", device = "device_id", function = "function_id");
    fields!(list, LinkAttr, "struct fi_link_attr": address, mtu, speed, state, network_type);
    fields!(list, Fid, "struct fid": class = "fclass", context, ops);
    fields!(list, Ops, "struct fi_ops": size, close, bind, control);
    fields!(list, Fabric, "struct fid_fabric": fid, ops);
    fields!(list, FabricOps, "struct fi_ops_fabric": size, domain);
    fields!(list, Domain, "struct fid_domain": fid, ops, mr);
    fields!(list, DomainOps, "struct fi_ops_domain": size, av_open, cq_open, endpoint);
    fields!(list, MrOps, "struct fi_ops_mr": size, reg, regv, regattr);
    fields!(list, Iovec, "struct iovec": base = "iov_base", len = "iov_len");
    fields!(list, MrAttr, "struct fi_mr_attr": mr_iov, iov_count, access, offset, requested_key, context, auth_key_size, auth_key, iface, device);
    fields!(list, Mr, "struct fid_mr": fid, desc = "mem_desc", key);
    fields!(list, AvAttr, "struct fi_av_attr": kind = "type", rx_ctx_bits, count, ep_per_node, name, map_addr, flags);
    fields!(list, Av, "struct fid_av": fid, ops);
    fields!(list, AvOps, "struct fi_ops_av": size, insert);
    fields!(list, CqAttr, "struct fi_cq_attr": size, flags, format, wait_obj, signaling_vector, wait_cond, wait_set);
    fields!(list, Cq, "struct fid_cq": fid, ops);
    fields!(list, CqOps, "struct fi_ops_cq": size, read, readfrom, readerr);
    fields!(list, CqDataEntry, "struct fi_cq_data_entry": op_context, flags, len, buf, data);
    fields!(list, CqErrEntry, "struct fi_cq_err_entry": op_context, flags, len, buf, data, tag, olen, err, prov_errno, err_data, err_data_size);
    fields!(list, Ep, "struct fid_ep": fid, ops, cm, msg, rma);
    fields!(list, CmOps, "struct fi_ops_cm": size, setname, getname);
    fields!(list, MsgOps, "struct fi_ops_msg": size, recv);
    fields!(list, RmaOps, "struct fi_ops_rma": size, read, write, writedata);

    let mut size = |c: &str, bytes: usize| list.push(Expected(format!("sizeof({c})"), bytes as u64));
    // Structures that this crate allocates.
    size("struct fi_cq_attr", size_of::<sys::CqAttr>());
    size("struct fi_av_attr", size_of::<sys::AvAttr>());
    size("struct fi_cq_data_entry", size_of::<sys::CqDataEntry>());
    size("struct fi_context2", 64);
    size("fi_addr_t", size_of::<sys::Address>());
    for (c, value) in [
        ("FI_MSG", sys::MSG),
        ("FI_RMA", sys::RMA),
        ("FI_WRITE", sys::WRITE),
        ("FI_RECV", sys::RECV),
        ("FI_SEND", sys::SEND),
        ("FI_TRANSMIT", sys::TRANSMIT),
        ("FI_REMOTE_WRITE", sys::REMOTE_WRITE),
        ("FI_REMOTE_CQ_DATA", sys::REMOTE_CQ_DATA),
        ("FI_TRANSMIT_COMPLETE", sys::TRANSMIT_COMPLETE),
        ("FI_DELIVERY_COMPLETE", sys::DELIVERY_COMPLETE),
        ("FI_HMEM", sys::HMEM),
        ("FI_HMEM_CUDA", sys::HMEM_CUDA as u64),
        ("FI_MR_HMEM", sys::MR_HMEM as u64),
        ("FI_SOURCE", sys::SOURCE),
        ("FI_CONTEXT", sys::CONTEXT),
        ("FI_CONTEXT2", sys::CONTEXT2),
        ("FI_RX_CQ_DATA", sys::RX_CQ_DATA),
        ("FI_MR_LOCAL", sys::MR_LOCAL as u64),
        ("FI_MR_VIRT_ADDR", sys::MR_VIRT_ADDR as u64),
        ("FI_MR_ALLOCATED", sys::MR_ALLOCATED as u64),
        ("FI_MR_PROV_KEY", sys::MR_PROV_KEY as u64),
        ("FI_MR_ENDPOINT", sys::MR_ENDPOINT as u64),
        ("FI_KEY_NOTAVAIL", sys::KEY_NOTAVAIL),
        ("FI_BUS_PCI", sys::BUS_PCI as u64),
        ("FI_LINK_DOWN", sys::LINK_DOWN as u64),
        ("FI_TC_DSCP", sys::TC_DSCP.into()),
        ("FI_TC_BEST_EFFORT", sys::TC_BEST_EFFORT.into()),
        ("FI_TC_LOW_LATENCY", sys::TC_LOW_LATENCY.into()),
        ("FI_TC_DEDICATED_ACCESS", sys::TC_DEDICATED_ACCESS.into()),
        ("FI_TC_BULK_DATA", sys::TC_BULK_DATA.into()),
        ("FI_TC_SCAVENGER", sys::TC_SCAVENGER.into()),
        ("FI_ADDR_STR", sys::ADDR_STR.into()),
        ("FI_AV_MAP", sys::AV_MAP as u64),
        ("FI_AV_TABLE", sys::AV_TABLE as u64),
        ("FI_EP_RDM", sys::EP_RDM as u64),
        ("FI_THREAD_DOMAIN", sys::THREAD_DOMAIN as u64),
        ("FI_CQ_FORMAT_DATA", sys::CQ_FORMAT_DATA as u64),
        ("FI_WAIT_NONE", sys::WAIT_NONE as u64),
        ("FI_ENABLE", sys::ENABLE as u64),
        ("FI_EAGAIN", sys::EAGAIN as u64),
        ("FI_ENOMEM", sys::ENOMEM as u64),
        ("FI_EACCES", sys::EACCES as u64),
        ("FI_EINVAL", sys::EINVAL as u64),
        ("FI_ENOSYS", sys::ENOSYS as u64),
        ("FI_ENODATA", sys::ENODATA as u64),
        ("FI_EMSGSIZE", sys::EMSGSIZE as u64),
        ("FI_EOPNOTSUPP", sys::EOPNOTSUPP as u64),
        ("FI_EAVAIL", sys::EAVAIL as u64),
        ("FI_VERSION(1, 17)", sys::version(1, 17).into()),
    ] {
        list.push(Expected(c.into(), value));
    }
    list
}

#[test]
fn the_declarations_match_the_headers() {
    let include = std::env::var("HYBRID_EP_LIBFABRIC_INCLUDE").unwrap_or_else(|_| "/usr/include".into());
    if !Path::new(&include).join("rdma/fabric.h").exists() {
        return eprintln!("SKIPPED: no headers of libfabric in {include}; apt-get install libfabric-dev");
    }
    let expected = expected();
    let mut source = String::from("#include <stddef.h>\n#include <stdio.h>\n");
    for header in ["fabric", "fi_cm", "fi_domain", "fi_endpoint", "fi_errno", "fi_eq", "fi_rma"] {
        writeln!(source, "#include <rdma/{header}.h>").unwrap();
    }
    source += "int main(void) {\n";
    for Expected(c, _) in &expected {
        writeln!(source, "printf(\"%llu\\n\", (unsigned long long)({c}));").unwrap();
    }
    for grows in ["fi_cq_err_entry", "fi_mr_attr"] {
        writeln!(source, "printf(\"%zu\\n\", sizeof(struct {grows}));").unwrap();
    }
    source += "return 0;\n}";
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (file, program) = (dir.join("layout.c"), dir.join("layout"));
    std::fs::write(&file, source).unwrap();
    let built = Command::new("cc").arg("-I").arg(&include).arg(&file).arg("-o").arg(&program).output();
    let Ok(built) = built else { return eprintln!("SKIPPED: no C compiler (cc)") };
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let printed = Command::new(&program).output().unwrap().stdout;
    let values: Vec<u64> =
        String::from_utf8(printed).unwrap().lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(values.len(), expected.len() + 2);
    for (Expected(c, ours), theirs) in expected.iter().zip(&values) {
        assert_eq!(ours, theirs, "{c}");
    }
    // These structures have room for the fields of later versions.
    assert!(values[expected.len()] <= size_of::<sys::CqErrEntry>() as u64);
    assert!(values[expected.len() + 1] <= size_of::<sys::MrAttr>() as u64);
}
