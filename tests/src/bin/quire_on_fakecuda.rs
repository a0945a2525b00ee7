//! The `quire` command, for tests that run it on the stand-in driver: its own crate may not depend
//! on that.

fn main() -> std::process::ExitCode {
    quire_server::run(std::env::args_os())
}
