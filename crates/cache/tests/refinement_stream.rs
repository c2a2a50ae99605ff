//! The kernel's stream parser is a refinement of the pure one: same bytes, however cut, same events and same state.

use std::{ffi::OsStr, mem::size_of};

use libbpf_rs::{MapCore, MapFlags, ObjectBuilder, ProgramInput};
use rand::{Rng, SeedableRng, rngs::StdRng};
use underpass_abi::cache::{UC_MODE_LOST, uc_stream};
use underpass_cache::stream::{Event, feed};

mod common;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/cache_stream.bpf.o"));
const STREAM: usize = size_of::<uc_stream>();
const BYTES: usize = 512;
const EVENTS: usize = 256;

struct Kernel {
    object: libbpf_rs::Object,
}

impl Kernel {
    fn load() -> Self {
        let object = ObjectBuilder::default().open_memory(OBJECT).unwrap().load().unwrap();
        Self { object }
    }

    fn map(&self) -> libbpf_rs::Map<'_> {
        self.object.maps().find(|map| map.name() == OsStr::new("run")).unwrap()
    }

    /// Feeds what one read returned; the state afterwards, and the events.
    fn feed(&self, stream: &uc_stream, bytes: &[u8]) -> (uc_stream, Vec<(u32, u32)>) {
        let mut value = vec![0; STREAM + 8 + BYTES + EVENTS * 4];
        // SAFETY: plain data without padding, read as bytes.
        value[..STREAM].copy_from_slice(unsafe { std::slice::from_raw_parts((&raw const *stream).cast(), STREAM) });
        value[STREAM..STREAM + 4].copy_from_slice(&(bytes.len() as u32).to_ne_bytes());
        value[STREAM + 8..STREAM + 8 + bytes.len()].copy_from_slice(bytes);
        let zero = 0u32.to_ne_bytes();
        self.map().update(&zero, &value, MapFlags::ANY).unwrap();
        let input = ProgramInput { data_in: Some(&[0; 64]), ..ProgramInput::default() };
        self.object.progs_mut().next().unwrap().test_run(input).unwrap();
        let value = self.map().lookup(&zero, MapFlags::ANY).unwrap().unwrap();
        let word = |at: usize| u32::from_ne_bytes(value[at..at + 4].try_into().unwrap());
        let events = (0..word(STREAM + 4) as usize).map(|i| word(STREAM + 8 + BYTES + 4 * i));
        // SAFETY: as many bytes as the structure has, and any bytes are a value of it.
        let stream = unsafe { value.as_ptr().cast::<uc_stream>().read_unaligned() };
        (stream, events.map(|event| (event >> 16, event & 0xffff)).collect())
    }
}

#[test]
fn the_kernel_parses_as_the_model_does() {
    let kernel = Kernel::load();
    let mut rng = StdRng::seed_from_u64(common::seed());
    let (mut events, mut lost) = (0, 0);
    for _ in 0..common::count(20_000) {
        let bytes = common::commands(&mut rng);
        let (mut pure, mut there) = (uc_stream::default(), uc_stream::default());
        let mut at = 0;
        while at < bytes.len() {
            let most = if rng.random_bool(0.5) { 4 } else { BYTES };
            let len = rng.random_range(1..=most).min(bytes.len() - at);
            let mut expected = Vec::new();
            feed(&mut pure, &bytes[at..at + len], |s, event| {
                let detail = if event == Event::Flush { s.number as u32 & 0xffff } else { u32::from(s.key_len) };
                expected.push((Event::to_abi(Some(event)), detail));
            });
            let (after, got) = kernel.feed(&there, &bytes[at..at + len]);
            assert_eq!(got, expected, "{:?} at {at}", String::from_utf8_lossy(&bytes));
            assert_eq!(after, pure, "{:?} at {at}", String::from_utf8_lossy(&bytes));
            events += got.len();
            there = after;
            at += len;
        }
        lost += usize::from(u32::from(pure.mode) == UC_MODE_LOST);
    }
    assert!(events > 1000 && lost > 10, "{events} events, {lost} lost");
}
