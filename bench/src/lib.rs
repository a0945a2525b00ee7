//! Criterion benches of Quire.
