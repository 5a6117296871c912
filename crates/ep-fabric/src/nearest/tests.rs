//! Trees of PCI devices.

use super::*;

/// A location with a path below `/sys/devices`.
fn at(path: &str, numa_node: Option<u32>) -> DeviceLocation {
    DeviceLocation { path: Some(format!("/sys/devices/{path}")), numa_node }
}

fn nic(path: &str, numa_node: Option<u32>) -> Nic {
    Nic { location: at(path, numa_node), gbit_per_s: 400.0 }
}

/// The NIC that each GPU gets, after a check that all GPUs have this relation.
#[track_caller]
fn chosen(gpus: &[DeviceLocation], nics: &[Nic], relation: Relation) -> Vec<usize> {
    let found = nearest(gpus, nics);
    assert!(found.iter().all(|gpu| gpu.relation == relation), "{found:?}");
    assert!(found.iter().all(|gpu| gpu.chosen.iter().all(|nic| gpu.nics.contains(nic))), "{found:?}");
    found.into_iter().map(|gpu| <[usize; 1]>::try_from(gpu.chosen).unwrap()[0]).collect()
}

/// The path of a device behind a switch, whose bus numbers follow from the number of the switch.
fn behind_switch(switch: usize, port: usize) -> String {
    let bus = 0x10 + 0x10 * switch;
    let (root, up, down) = (
        format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0"),
        format!("0000:{:02x}:00.0", bus + 1),
        format!("0000:{:02x}:{port:02x}.0", bus + 2),
    );
    format!("{root}/{up}/{down}/0000:{:02x}:00.0", bus + 3 + port)
}

#[test]
fn two_gpus_and_two_nics_on_each_of_four_switches() {
    let node = |switch| Some(switch as u32 / 2);
    let gpus: Vec<DeviceLocation> =
        (0..8).map(|gpu| at(&behind_switch(gpu / 2, gpu % 2), node(gpu / 2))).collect();
    let mut nics: Vec<Nic> = (0..8).map(|i| nic(&behind_switch(i / 2, 2 + i % 2), node(i / 2))).collect();
    assert_eq!(chosen(&gpus, &nics, Relation::SameSwitch), [0, 1, 2, 3, 4, 5, 6, 7]);
    let found = nearest(&gpus, &nics);
    assert_eq!((&found[0].nics, &found[1].nics, &found[7].nics), (&vec![0, 1], &vec![0, 1], &vec![6, 7]));
    // The order of the devices does not matter.
    nics.reverse();
    assert_eq!(chosen(&gpus, &nics, Relation::SameSwitch), [7, 6, 5, 4, 3, 2, 1, 0]);
    let reversed: Vec<DeviceLocation> = gpus.iter().rev().cloned().collect();
    assert_eq!(chosen(&reversed, &nics, Relation::SameSwitch), [0, 1, 2, 3, 4, 5, 6, 7]);
    // One NIC for the two GPUs of a switch.
    let half: Vec<Nic> = nics.into_iter().step_by(2).collect();
    assert_eq!(chosen(&gpus, &half, Relation::SameSwitch), [3, 3, 2, 2, 1, 1, 0, 0]);
}

#[test]
fn gpus_share_several_nics_each_evenly() {
    let gpus: Vec<DeviceLocation> = (0..4).map(|gpu| at(&behind_switch(gpu / 2, gpu % 2), None)).collect();
    // Four NICs behind the first switch, and `second` behind the second.
    let shared = |second: usize| {
        let nics = (0..4).map(|port| (0, port)).chain((0..second).map(|port| (1, port)));
        let nics: Vec<Nic> = nics.map(|(switch, port)| nic(&behind_switch(switch, 2 + port), None)).collect();
        nearest(&gpus, &nics).into_iter().map(|gpu| gpu.chosen).collect::<Vec<_>>()
    };
    assert_eq!(shared(4), [[0, 2], [1, 3], [4, 6], [5, 7]]);
    // All GPUs get the same number of NICs.
    assert_eq!(shared(3), [[0], [1], [4], [5]]);
    assert_eq!(shared(1), [[0], [1], [4], [4]]);
}

#[test]
fn a_switch_below_a_switch_is_nearer() {
    let trunk = "pci0000:15/0000:15:01.0/0000:16:00.0";
    let deep = |port: u32| {
        format!("{trunk}/0000:17:00.0/0000:18:00.0/0000:19:{port:02x}.0/0000:{:02x}:00.0", 0x20 + port)
    };
    let gpu = at(&deep(0), None);
    let nics = [nic(&format!("{trunk}/0000:17:01.0/0000:30:00.0"), None), nic(&deep(1), None)];
    let found = nearest(&[gpu], &nics);
    assert_eq!((found[0].nics.as_slice(), found[0].relation), (&[1][..], Relation::SameSwitch));
}

#[test]
fn the_nearest_relation_wins() {
    let gpu = at("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0", Some(0));
    let levels = [
        (Relation::Unknown, nic("platform/rdma", None)),
        (Relation::OtherNumaNode, nic("pci0000:80/0000:80:01.0/0000:81:00.0", Some(1))),
        (Relation::SameNumaNode, nic("pci0000:30/0000:30:01.0/0000:31:00.0", Some(0))),
        // Behind a different root port, even if the port's address differs in the last digit only.
        (
            Relation::SameRootComplex,
            nic("pci0000:15/0000:15:01.1/0000:16:00.0/0000:17:01.0/0000:19:00.0", Some(0)),
        ),
        (
            Relation::SameRootPort,
            nic("pci0000:15/0000:15:01.0/0000:16:00.1/0000:1a:00.0/0000:1b:00.0", Some(0)),
        ),
        (
            Relation::SameSwitch,
            nic("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0", Some(0)),
        ),
    ];
    for best in 0..levels.len() {
        let nics: Vec<Nic> = levels[..=best].iter().map(|(_, nic)| nic.clone()).collect();
        let found = nearest(std::slice::from_ref(&gpu), &nics);
        assert_eq!((found[0].relation, found[0].nics.as_slice()), (levels[best].0, &[best][..]));
    }
}

#[test]
fn gpus_with_the_same_nearest_nics_share_them_evenly() {
    let on_bus = |slot: u32| format!("pci0000:10/0000:10:{slot:02x}.0");
    // Two GPUs and a NIC on one bus without bridges, as in virtual machines of a cloud.
    let gpus = [0x1c, 0x1d].map(|slot| at(&on_bus(slot), None));
    assert_eq!(chosen(&gpus, &[nic(&on_bus(0x1b), None)], Relation::SameRootComplex), [0, 0]);

    // GPU 0 may use both NICs, and GPU 1 is nearer to NIC 0: GPU 1 chooses first.
    let switch =
        |port: u32| format!("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:{port:02x}.0/0000:2{port}:00.0");
    let gpus = [at(&on_bus(0x1c), None), at(&switch(0), None)];
    let nics = [nic(&switch(1), None), nic(&on_bus(0x1b), None)];
    let found = nearest(&gpus, &nics);
    assert_eq!((found[0].nics.as_slice(), &found[0].chosen), (&[0, 1][..], &vec![1]));
    assert_eq!((found[1].nics.as_slice(), &found[1].chosen), (&[0][..], &vec![0]));
}

#[test]
fn a_flat_bus_gives_ties_that_are_spread() {
    let on_bus = |slot: u32| format!("pci0000:00/0000:00:{slot:02x}.0");
    let gpus: Vec<DeviceLocation> = (0..4).map(|gpu| at(&on_bus(4 + gpu), None)).collect();
    let nics: Vec<Nic> = (0..3).map(|card| nic(&on_bus(10 + card), None)).collect();
    assert_eq!(chosen(&gpus, &nics, Relation::SameRootComplex), [0, 1, 2, 0]);
    assert_eq!(nearest(&gpus, &nics)[3].nics, [0, 1, 2]);
}

#[test]
fn numa_nodes_decide_between_root_complexes() {
    // Each device has a root complex of its own below a virtual bus.
    let passed = |domain: u32| {
        format!(
            "LNXSYSTM:00/VMBUS:00/00000000-0000-1111-aaaa-{domain:012x}/pci{domain:04x}:00/{domain:04x}:00:00.0"
        )
    };
    let location = |domain: u32, node| at(&passed(domain), node);
    let gpus = [location(1, Some(0)), location(2, Some(1))];
    let nics = [3, 4].map(|domain| Nic { location: location(domain, Some(4 - domain)), gbit_per_s: 400.0 });
    assert_eq!(chosen(&gpus, &nics, Relation::SameNumaNode), [1, 0]);
    assert_eq!(chosen(&[location(5, Some(2))], &nics, Relation::OtherNumaNode), [0]);
    // Without nodes and without a common bridge, the GPUs still share the NICs.
    let bare = [location(1, None), location(2, None)];
    assert_eq!(chosen(&bare, &nics, Relation::Unknown), [0, 1]);
    assert_eq!(
        chosen(&[DeviceLocation::default(), DeviceLocation::default()], &nics, Relation::Unknown),
        [0, 1]
    );
}

#[test]
fn of_nics_at_the_same_distance_the_fastest_count() {
    let on_bus = |slot: u32| format!("pci0000:00/0000:00:{slot:02x}.0");
    let rated = |slot, gbit_per_s| Nic { gbit_per_s, ..nic(&on_bus(slot), None) };
    let gpu = at(&on_bus(1), None);
    let found = nearest(&[gpu], &[rated(2, 25.0), rated(3, 400.0), rated(4, 0.0), rated(5, 400.0)]);
    assert_eq!(found[0].nics, [1, 3]);
}

#[test]
fn without_nics_nothing_is_nearest() {
    assert_eq!(nearest(&[DeviceLocation::default()], &[]), []);
    assert_eq!(nearest(&[], &[nic("pci0000:00/0000:00:01.0", None)]), []);
}

#[test]
fn only_bridges_of_the_bus_count() {
    let path = "/sys/devices/platform/a:b/pci0008:00/0008:00:00.0/0008:01:00.0/mlx5_core.sf.4";
    assert_eq!(bridges(path), ["pci0008:00", "0008:00:00.0"]);
    for path in
        ["", "/", "/sys/devices/virtual/rdma", "/sys/class/infiniband/mlx5_0/device", "pci:/0000:00:01.0"]
    {
        assert_eq!(bridges(path), [""; 0], "{path:?}");
    }
}

#[test]
fn nics_of_an_rdma_network_come_before_others() {
    let preferred = |networks: &[&str]| Nic::preferred_network(networks.iter().copied());
    assert_eq!(preferred(&["Ethernet", "InfiniBand", "unknown"]), Some(Nic::INFINIBAND));
    assert_eq!(preferred(&["InfiniBand", "EFA"]), Some(Nic::EFA));
    assert_eq!(preferred(&["Ethernet", "unknown"]), None);
    assert_eq!(preferred(&[]), None);
}
