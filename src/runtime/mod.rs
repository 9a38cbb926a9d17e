//! From a program to numbers: platforms, compilation, upload, execution.
