//! The networks of LTX-2.
