//! Oracle, strategies, property, conformance and golden tests of Quire.
