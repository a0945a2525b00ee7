//! The `quire` command.

fn main() -> std::process::ExitCode {
    quire_server::run(std::env::args_os())
}
