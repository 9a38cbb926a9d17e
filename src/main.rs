//! The `ltx2` command.
fn main() {}
