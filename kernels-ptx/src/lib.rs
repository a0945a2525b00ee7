//! The committed PTX of the Triton kernels and their typed launch structs.
