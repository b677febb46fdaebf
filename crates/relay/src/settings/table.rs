//! The table of all settings, in Markdown, as `docs/configuration.md` holds it.

use std::fmt::Write as _;

use clap::{Arg, Command};

const HEAD: &str = "\
# Configuration

This file is what `outbox-relay config docs` prints.

A value comes from the flag, else from the environment, else from the file that `--config FILE` (`OUTBOX_CONFIG`) names, else
from the default. A setting that is unknown, of the wrong type, out of its bounds, or against another one is refused with exit code 64
and one line that names it, where it was set, and what is allowed. `outbox-relay config check` takes the flags of `run`, says
where each value comes from, connects to both servers, and says in one line for each what is wrong: exit code 0 if nothing is, 1
for a server, 64 for the configuration.

The file is TOML. Its keys are the flags without their dashes, at the top, without sections. Numbers stand without quotes, times and
all other text in quotes:

```toml
database-url-file = \"/run/secrets/database-url\"
redis-url = \"redis://localhost:6379\"
page-rows = 2000
retention = \"7d\"
listen = \"127.0.0.1:9464\"
```

Addresses with passwords may stand in files of their own (`--database-url-file`, `--redis-url-file`). Those are read anew for
each connection, so a password that was changed there is taken without a restart.

| flag | environment | key in the file | unit | default | meaning |
|---|---|---|---|---|---|
";

/// The whole document.
pub(crate) fn document(command: &Command) -> String {
    let mut text = HEAD.to_owned();
    for arg in super::arguments(command) {
        // Writing to a string does not fail.
        let _ = row(&mut text, arg);
    }
    text
}

fn row(text: &mut String, arg: &Arg) -> std::fmt::Result {
    let key = arg.get_long().unwrap_or_default();
    let variable = arg
        .get_env()
        .map(|name| format!("`{}`", name.to_string_lossy()));
    let (meaning, told) = meaning(arg);
    let default = default(arg).or(told).unwrap_or_default();
    writeln!(
        text,
        "| `--{key}` | {} | `{key}` | {} | {default} | {meaning} |",
        variable.unwrap_or_default(),
        unit(arg),
    )
}

/// What the value is counted in, or which ones there are.
fn unit(arg: &Arg) -> String {
    if !arg.get_action().takes_values() {
        return "`true`, `false`".to_owned();
    }
    let possible: Vec<String> = arg
        .get_possible_values()
        .iter()
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if !possible.is_empty() {
        return possible.join(", ");
    }
    let name = arg.get_value_names().and_then(|names| names.first());
    match name.map(clap::builder::Str::as_str) {
        Some("TIME") => "time: `500ms`, `10s`, `3d`".to_owned(),
        Some("ROWS") => "messages".to_owned(),
        Some(name) => name.to_lowercase(),
        None => String::new(),
    }
}

fn default(arg: &Arg) -> Option<String> {
    let values = arg.get_default_values();
    let values: Vec<_> = values
        .iter()
        .map(|value| format!("`{}`", value.to_string_lossy()))
        .collect();
    (arg.get_action().takes_values() && !values.is_empty()).then(|| values.join(", "))
}

/// The help in one line, and the default where only the help tells it.
fn meaning(arg: &Arg) -> (String, Option<String>) {
    let help = arg.get_long_help().or(arg.get_help());
    let help = help.map(ToString::to_string).unwrap_or_default();
    let mut sentences: Vec<String> = Vec::new();
    let mut told = None;
    for paragraph in help.split("\n\n") {
        let mut line = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
        if let Some((before, default)) = line.split_once(" [default: ") {
            told = Some(default.trim_end_matches(']').to_owned());
            line = before.to_owned();
        }
        sentences.push(line.trim_end_matches('.').to_owned());
    }
    (sentences.join(". ").replace('|', "\\|"), told)
}
