//! Reading optimized programs: collectives, loops, memory.
