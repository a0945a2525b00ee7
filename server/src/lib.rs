//! The quire command line.
