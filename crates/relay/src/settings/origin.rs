//! Which of flag, environment, file and default a value came from.

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};

use super::file::Entries;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The command line.
    Flag,
    /// This variable.
    Environment(String),
    /// The file of `--config`.
    File,
    /// The code.
    Default,
    /// There is none.
    Nowhere,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::Flag => f.write_str("flag"),
            Origin::Environment(name) => write!(f, "environment {name}"),
            Origin::File => f.write_str("file"),
            Origin::Default => f.write_str("default"),
            Origin::Nowhere => f.write_str("not set"),
        }
    }
}

/// A setting with its value.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// The key in the file; the flag without its dashes.
    pub(crate) key: String,
    /// The value as it was written, several of them with commas between; empty when there is none. A secret is `***`.
    pub(crate) value: String,
    /// Where it came from.
    pub(crate) origin: Origin,
}

/// All settings that the given command knows.
pub(super) fn of_all(command: &Command, matches: &ArgMatches, entries: &Entries) -> Vec<Setting> {
    let given = super::innermost(matches);
    super::arguments(command)
        .into_iter()
        .filter_map(|arg| of_one(arg, given, entries))
        .collect()
}

fn of_one(arg: &Arg, matches: &ArgMatches, entries: &Entries) -> Option<Setting> {
    let id = arg.get_id().as_str();
    let key = arg.get_long()?;
    let raw = matches.try_get_raw(id).ok()?;
    let origin = match matches.value_source(id) {
        Some(ValueSource::CommandLine) => Origin::Flag,
        Some(ValueSource::EnvVariable) => {
            let name = arg.get_env().map(|name| name.to_string_lossy());
            Origin::Environment(name.unwrap_or_default().into_owned())
        }
        Some(_) if entries.get(key).is_some() => Origin::File,
        Some(_) => Origin::Default,
        None => Origin::Nowhere,
    };
    let values = raw
        .into_iter()
        .flatten()
        .map(|value| value.to_string_lossy());
    let values: Vec<_> = values.collect();
    let secret = arg.is_hide_env_values_set() && !values.is_empty();
    Some(Setting {
        key: key.to_owned(),
        value: if secret {
            "***".to_owned()
        } else {
            values.join(",")
        },
        origin,
    })
}
