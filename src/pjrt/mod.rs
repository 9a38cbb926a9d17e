//! Safe wrappers of the PJRT C interface.
