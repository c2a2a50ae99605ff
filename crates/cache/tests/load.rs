//! The programs load, and follow a process.

use underpass_abi::cache::uc_settings;
use underpass_cache::kernel::{Kernel, Sizes};

#[test]
fn the_programs_load_and_follow() {
    // What is zero is constant to the verifier, which then does not look at everything.
    let settings = uc_settings { address_count: 2, prefix_count: 3, port: 5, secret: [7, 8], ..Default::default() };
    let mut kernel = Kernel::load(settings, Sizes::of_budget(4, 4)).unwrap();
    kernel.follow(std::process::id()).unwrap();
    println!("{} bytes", kernel.map_bytes().unwrap());
}
