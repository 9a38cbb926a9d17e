//! Layers: parameters with logical axes, linear, norms, attention.
