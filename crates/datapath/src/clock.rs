//! The kernel's tick counter as a clock: what a program needs to know of it (`bpf/lib/clock.h`).

use libbpf_rs::{ObjectBuilder, ProgramInput};
use nix::time::{ClockId, clock_getres};
use underpass_abi::abi::UP_TICK_SHIFT;

use crate::coordinator::LoadError;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/clock.bpf.o"));

const NS_PER_MS: u64 = 1_000_000;

/// The tick counter at one moment, and its pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticks {
    /// The counter.
    pub count: u64,
    /// CLOCK_MONOTONIC then, in milliseconds.
    pub at_ms: u64,
    /// Milliseconds of a tick, times 2^[`UP_TICK_SHIFT`].
    pub length: u64,
}

/// Reads the counter.
///
/// # Errors
/// When the kernel does not load or run the program that reads it.
pub fn ticks() -> Result<Ticks, LoadError> {
    let kernel = |source| LoadError::Kernel { what: "reading the kernel's tick counter".into(), source };
    let object = ObjectBuilder::default().open_memory(OBJECT).and_then(|open| open.load()).map_err(kernel)?;
    let program = object.progs_mut().next().expect("one program");
    let mut out = [0; 64];
    let input = ProgramInput { data_in: Some(&[0; 64]), data_out: Some(&mut out), ..ProgramInput::default() };
    program.test_run(input).map_err(kernel)?;
    let word = |at: usize| u64::from_ne_bytes(out[at..at + 8].try_into().expect("8 bytes"));
    // The resolution of the coarse clocks is one tick.
    let tick = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).expect("Linux has this clock");
    let tick_ns = tick.tv_sec() as u64 * 1000 * NS_PER_MS + tick.tv_nsec() as u64;
    Ok(Ticks { count: word(0), at_ms: word(8) / NS_PER_MS, length: (tick_ns << UP_TICK_SHIFT) / NS_PER_MS })
}
