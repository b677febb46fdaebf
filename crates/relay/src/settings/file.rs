//! The file of `--config`: TOML, one key for each flag, no sections.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::ops::Range;
use std::path::Path;

use clap::error::{ContextKind, ErrorKind};
use clap::{Arg, ArgAction, Command};
use toml::de::{DeTable, DeValue};

/// No settings are longer than this; whatever is was named by mistake.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What a key of the file says, as the flag would be given it.
#[derive(Debug, Default)]
pub(super) struct Entries(BTreeMap<String, Vec<String>>);

impl Entries {
    pub(super) fn get(&self, key: &str) -> Option<&Vec<String>> {
        self.0.get(key)
    }
}

/// Reads the file and checks each of its values as if the flag had been given.
///
/// # Errors
///
/// One line that names the file, the line and the key, and says what is allowed. No value is repeated: it may be a secret.
pub(super) fn read(path: &Path, command: &Command) -> Result<Entries, String> {
    let refused = |problem: String| format!("--config {}: {problem}", path.display());
    let unreadable = |e: std::io::Error| refused(format!("cannot be read: {e}"));
    let size = std::fs::metadata(path).map_err(unreadable)?.len();
    if size > FILE_BYTES_MAX {
        return Err(refused(format!(
            "has {size} bytes; a file of settings has {FILE_BYTES_MAX} at the most"
        )));
    }
    let text = std::fs::read_to_string(path).map_err(unreadable)?;
    let line = |span: Range<usize>| text[..span.start].matches('\n').count() + 1;
    let table = DeTable::parse(&text).map_err(|e| {
        // The error's own text shows the line, and what stands there may be a secret.
        let line = e.span().map_or(1, line);
        refused(format!(
            "line {line} is no TOML: {}",
            e.message().replace('\n', " ")
        ))
    })?;
    let known = super::arguments(command);
    let mut entries = Entries::default();
    for (key, value) in table.get_ref() {
        let line = line(key.span());
        let key = key.get_ref();
        let refused = |problem: String| refused(format!("line {line}, key {key}: {problem}"));
        let arg = known.iter().find(|arg| arg.get_long() == Some(key));
        let Some(arg) = arg else {
            return Err(refused(unknown(key, &known, value.get_ref())));
        };
        let kind = Kind::of(command, arg);
        let values = values(arg, kind, value.get_ref()).map_err(refused)?;
        // A switch takes either word.
        for value in values.iter().filter(|_| !matches!(kind, Kind::Switch)) {
            accepts(command, key, value).map_err(refused)?;
        }
        entries.0.insert(key.to_string(), values);
    }
    Ok(entries)
}

fn unknown(key: &str, known: &[&Arg], value: &DeValue<'_>) -> String {
    if value.is_table() {
        return "is a section; all keys stand at the top, without sections".to_owned();
    }
    let keys: Vec<&str> = known.iter().filter_map(|arg| arg.get_long()).collect();
    let written_otherwise = key.trim_start_matches("--").replace('_', "-");
    match keys.iter().find(|known| **known == written_otherwise) {
        Some(known) => format!("is not known; write {known}"),
        None => format!("is not known; the keys are {}", keys.join(", ")),
    }
}

/// The value in the form in which the flag takes it.
fn values(arg: &Arg, kind: Kind, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let several =
        matches!(arg.get_action(), ArgAction::Append) || arg.get_value_delimiter().is_some();
    match value {
        DeValue::Array(values) if several => values
            .iter()
            .map(|value| scalar(kind, value.get_ref()))
            .collect(),
        value => Ok(vec![scalar(kind, value)?]),
    }
}

fn scalar(wanted: Kind, value: &DeValue<'_>) -> Result<String, String> {
    match (wanted, value) {
        (Kind::Switch, DeValue::Boolean(on)) => Ok(on.to_string()),
        (Kind::Number, DeValue::Integer(number)) if number.radix() == 10 => {
            Ok(number.as_str().replace('_', ""))
        }
        (Kind::Text, DeValue::String(text)) => Ok(text.to_string()),
        (_, value) => Err(format!(
            "must be {}, not {}",
            wanted.described(),
            described(value)
        )),
    }
}

/// What a key wants in TOML.
#[derive(Clone, Copy)]
enum Kind {
    Switch,
    Number,
    Text,
}

impl Kind {
    /// What clap takes is not to be seen from outside, so it is tried: a number is what is no word.
    fn of(command: &Command, arg: &Arg) -> Self {
        if !arg.get_action().takes_values() {
            return Kind::Switch;
        }
        let takes = |value| accepts(command, arg.get_long().unwrap_or_default(), value).is_ok();
        if !takes("x") && ["1", "1000", "1000000"].into_iter().any(takes) {
            Kind::Number
        } else {
            Kind::Text
        }
    }

    fn described(self) -> &'static str {
        match self {
            Kind::Switch => "true or false",
            Kind::Number => "a decimal number without quotes",
            Kind::Text => "text in quotes",
        }
    }
}

fn described(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "text",
        DeValue::Integer(_) => "a number",
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a section",
    }
}

/// Has clap read the value as the flag's.
fn accepts(command: &Command, key: &str, value: &str) -> Result<(), String> {
    let flag = format!("--{key}={value}");
    let program = command.get_name().to_owned();
    let Err(error) = command
        .clone()
        .try_get_matches_from([program, "run".to_owned(), flag])
    else {
        return Ok(());
    };
    match error.kind() {
        // What else is given is not the file's fault.
        ErrorKind::ArgumentConflict | ErrorKind::MissingRequiredArgument => Ok(()),
        _ => Err(match (error.get(ContextKind::ValidValue), error.source()) {
            (Some(valid), _) => format!("is none of {valid}"),
            (None, Some(cause)) if is_time(command, key) => {
                format!("is refused: {cause}; write e.g. \"500ms\", \"10s\" or \"3d\"")
            }
            (None, Some(cause)) => format!("is refused: {cause}"),
            (None, None) => "is refused".to_owned(),
        }),
    }
}

fn is_time(command: &Command, key: &str) -> bool {
    let known = super::arguments(command);
    let arg = known.iter().find(|arg| arg.get_long() == Some(key));
    let name = arg.and_then(|arg| arg.get_value_names()?.first());
    name.is_some_and(|name| name == "TIME")
}
