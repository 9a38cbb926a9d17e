//! From a request to a file.
