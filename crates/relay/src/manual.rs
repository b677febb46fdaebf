//! Shell completions and manual pages, made from the command line's own definitions.

use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use outbox_relay::{Error, Result};

/// The script that teaches a shell the commands and flags.
pub(crate) fn completions(mut command: Command, shell: Shell) -> String {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    let script = String::from_utf8_lossy(&script);
    // For bash, clap_complete 4.6 takes the hyphen of the program's name for the end of a command in one place and not in
    // the other, so that nothing but the first word would be completed.
    script.replace("outbox__subcmd__relay", "outbox__relay")
}

/// The page of the program itself, in roff.
///
/// # Errors
///
/// None so far: it is written to memory.
pub(crate) fn page(command: Command) -> Result<String> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command)
        .render(&mut page)
        .map_err(|e| not_written(Path::new("the page"), &e))?;
    Ok(String::from_utf8_lossy(&page).into_owned())
}

/// Writes that page and one for each command into a directory, which must exist.
///
/// # Errors
///
/// [`Error::Setup`] when it cannot be written to.
pub(crate) fn write_pages(command: Command, dir: &Path) -> Result<()> {
    // What `help` takes are the commands themselves, which have their pages.
    let command = command.disable_help_subcommand(true);
    clap_mangen::generate_to(command, dir).map_err(|e| not_written(dir, &e))
}

fn not_written(path: &Path, error: &std::io::Error) -> Error {
    Error::Setup {
        problem: format!("{} cannot be written: {error}", path.display()),
        remedy: "name a directory that exists and that you may write to".into(),
    }
}
