//! The binary underpass.
fn main() {}
