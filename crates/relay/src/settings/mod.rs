//! Where the settings of the binary come from: a flag, else the environment, else the file of `--config`, else the
//! default. All of it follows from clap's definitions: a new flag of `run` is a key of the file, a row of the table and a
//! line of `config check` by itself.

mod check;
mod file;
mod origin;
mod table;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches};

pub(crate) use self::check::check;
pub(crate) use self::origin::{Origin, Setting};
pub(crate) use self::table::document;

use self::file::Entries;

/// The flag that names the file. It is no key of the file itself.
const FILE_FLAG: &str = "config";

/// Why there are no settings.
pub(crate) enum Refused {
    /// The command line or a variable; it may also be that help was asked for.
    CommandLine(clap::Error),
    /// The file: one line that names it, the key and the remedy.
    File(String),
}

/// Where each value came from.
pub(crate) struct Settings {
    all: Vec<Setting>,
    file: Option<PathBuf>,
}

impl Settings {
    /// One for each key of the file, in the order of the help.
    pub(crate) fn all(&self) -> &[Setting] {
        &self.all
    }

    /// Says where the value of a flag came from, when it stands on no command line: whoever is to mend it looks there.
    pub(crate) fn place_of(&self, flag: &str) -> Option<String> {
        let key = flag.strip_prefix("--")?;
        let setting = self.all.iter().find(|setting| setting.key == key)?;
        match &setting.origin {
            Origin::Environment(name) => Some(format!("it is set by {name}")),
            Origin::File => {
                let file = self.file.as_deref().unwrap_or(Path::new("the file"));
                Some(format!("it is set by the key {key} in {}", file.display()))
            }
            Origin::Flag | Origin::Default | Origin::Nowhere => None,
        }
    }
}

/// Reads the command line, the environment, and the file that one of them names.
pub(crate) fn read<C: CommandFactory + FromArgMatches>(
    args: &[OsString],
) -> Result<(C, Settings), Refused> {
    let command = C::command();
    // Nothing that the file could hold is required, so what fails here fails with the file as well.
    let matches = command
        .clone()
        .try_get_matches_from(args)
        .map_err(Refused::CommandLine)?;
    let file = matches.get_one::<PathBuf>(FILE_FLAG).cloned();
    let entries = match &file {
        Some(path) => file::read(path, &command).map_err(Refused::File)?,
        None => Entries::default(),
    };
    let matches = with_defaults(command.clone(), &entries)
        .try_get_matches_from(args)
        .map_err(Refused::CommandLine)?;
    let all = origin::of_all(&command, &matches, &entries);
    let cli = C::from_arg_matches(&matches).map_err(Refused::CommandLine)?;
    Ok((cli, Settings { all, file }))
}

/// The arguments that the file may set: those of all commands, and those of `run`.
fn arguments(command: &Command) -> Vec<&Arg> {
    let run = command.find_subcommand("run");
    command
        .get_arguments()
        .chain(run.into_iter().flat_map(Command::get_arguments))
        .filter(|arg| arg.get_long().is_some_and(|long| long != FILE_FLAG))
        .filter(|arg| !matches!(arg.get_id().as_str(), "help" | "version"))
        .collect()
}

/// Puts what the file says in the place of the defaults, so that flags and environment go before it.
fn with_defaults(command: Command, entries: &Entries) -> Command {
    let apply = |arg: Arg| match arg.get_long().and_then(|key| entries.get(key)) {
        Some(values) => arg.default_values(values.clone()).hide_default_value(true),
        None => arg,
    };
    command
        .mut_args(apply)
        .mut_subcommand("run", |run| run.mut_args(apply))
        .mut_subcommand("config", |config| {
            config.mut_subcommand("check", |check| check.mut_args(apply))
        })
}

/// The matches of the command that was given, which know the flags of all commands too.
fn innermost(matches: &ArgMatches) -> &ArgMatches {
    match matches.subcommand() {
        Some((_, inner)) => innermost(inner),
        None => matches,
    }
}
