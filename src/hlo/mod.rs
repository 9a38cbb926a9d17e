//! The typed StableHLO text builder.
