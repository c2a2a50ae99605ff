//! Loads every program of the coordinator and exercises it: the test that also runs inside other kernels.

mod common;

use common::*;
use underpass_abi::abi;
use underpass_datapath::{
    coordinator::{CoordinatorKernel, TableSizes},
    frame,
};
use underpass_protocol::wire::{Header, Kind, Op, Packet, SessionId, Status};

fn write(request: u64, value: &[u8]) -> Vec<u8> {
    let mut header = Header::new(Op::Write);
    header.kind = Kind::Put.to_wire();
    header.shard = 1;
    header.session = SessionId::new(1, 5);
    header.token = 99;
    header.request = request;
    header.set_reply_to(client_endpoint(5));
    frame(client_endpoint(5), client_mac(5), &header.datagram(b"key", value))
}

#[test]
fn a_write_is_ordered_acknowledged_and_committed() {
    let mut twins = Twins::new(&mut rng(1), TableSizes { buckets: 1 << 10, sessions: 1 << 8 });
    twins.configure(config(1, 1, 3));
    twins.open(SessionId::new(1, 5), 1, 99, client_endpoint(5));
    let ordered = twins.kernel.run(&write(1, b"value")).unwrap();
    assert_eq!(ordered.verdict, XDP_REDIRECT);
    for index in 0..3 {
        let clone = twins.kernel.run_egress(&ordered.frame).unwrap();
        let (_, datagram) = frame::parse(&clone.frame).unwrap();
        let mut header = Packet::parse(datagram).unwrap().header;
        assert_eq!(header.cnt, index);
        header.op = Op::WReply;
        header.status = Status::Ok.to_wire();
        let reply = frame(member_endpoint(1, index), member_mac(1, index), &header.datagram(b"key", b""));
        let run = twins.kernel.run(&reply).unwrap();
        assert_eq!(run.verdict, if index < 2 { XDP_DROP } else { XDP_TX });
        if index == 2 {
            let (to, _) = frame::parse(&run.frame).unwrap();
            assert_eq!(to.destination, (client_endpoint(5).addr, client_endpoint(5).port));
            assert!(frame::checksums_hold(&run.frame));
        }
    }
    assert_eq!(twins.kernel.counters().unwrap()[abi::UP_COUNT_COMMIT as usize], 1);
}

#[test]
fn every_write_path_loads() {
    for write_path in [abi::UP_WRITE_PATH_BROADCAST, abi::UP_WRITE_PATH_TC, abi::UP_WRITE_PATH_PUBLISHED] {
        let settings = abi::up_settings { write_path, ..Default::default() };
        let kernel =
            CoordinatorKernel::load(settings, TableSizes { buckets: 1 << 14, sessions: 1 << 14 }, None).unwrap();
        let bytes = kernel.map_bytes().unwrap();
        assert!(bytes < 64 << 20, "{bytes} bytes of maps at the default size");
    }
}
