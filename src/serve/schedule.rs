//! The order of jobs: first come first served, with those that can be made together.
