#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ltx2_fuzz::trace(bytes));
