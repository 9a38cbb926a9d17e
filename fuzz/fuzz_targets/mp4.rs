#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(ltx2_fuzz::mp4(bytes)));
