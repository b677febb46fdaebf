//! No document says of flags, variables or rights what the code does not: there is one table of settings, which the binary
//! prints, and one list of rights, which `outbox-relay grants` prints.

use std::{collections::BTreeSet, fs, process::Command};

use crate::documents::{document, root};

/// The generated table of settings.
pub(crate) const SETTINGS: &str = "docs/configuration.md";

/// Flags in documents that are not the relay's: of the failure suite, of cargo and of vacuumdb.
const FLAGS_OF_OTHERS: [&str; 5] = [
    "--only",
    "--setup-sql",
    "--effects-sql",
    "--features",
    "--analyze-in-stages",
];

/// Every `--flag` in a text.
pub(crate) fn flags(text: &str) -> BTreeSet<String> {
    let is_flag = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    text.split(|c| !is_flag(c))
        .filter(|word| {
            word.strip_prefix("--")
                .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_lowercase()))
        })
        .map(str::to_owned)
        .collect()
}

/// The variables named in a text, by the look of their names.
pub(crate) fn variables(text: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    text.split(|c| !is_name(c))
        .filter(|w| w.starts_with("OUTBOX_") || *w == "DATABASE_URL" || *w == "REDIS_URL")
        .map(str::to_owned)
        .collect()
}

/// What the binary prints.
pub(crate) fn relay(args: &[&str]) -> String {
    let output = Command::new(outbox_testkit::relay_binary())
        .args(args)
        .output()
        .unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// What users read, by path.
fn documents() -> Vec<String> {
    let mut names = vec!["README.md".to_owned()];
    for dir in ["docs", "crates"] {
        for entry in fs::read_dir(root().join(dir)).unwrap() {
            let name = format!(
                "{dir}/{}",
                entry.unwrap().file_name().into_string().unwrap()
            );
            names.push(if dir == "docs" {
                name
            } else {
                format!("{name}/README.md")
            });
        }
    }
    names.retain(|name| name.ends_with(".md") && root().join(name).is_file());
    assert!(names.len() >= 12, "{names:?}");
    names
}

/// The only table of settings is the one that the binary prints; `crates/relay/tests/relay/configuration.rs` compares them.
#[test]
fn no_document_has_a_table_of_settings_beside_the_generated_one() {
    for name in documents() {
        let text = document(&name);
        let is_row = |line: &&str| {
            let first = line
                .trim_start()
                .strip_prefix('|')
                .and_then(|rest| rest.split('|').next());
            let first = first.map(|first| first.trim_start().trim_start_matches('`'));
            first.is_some_and(|first| first.starts_with("--") && !flags(first).is_empty())
        };
        let rows = text.lines().filter(is_row).count();
        assert!(
            rows == 0 || name == SETTINGS,
            "{name} has {rows} rows of flags"
        );
    }
    assert!(document("README.md").contains("](docs/configuration.md)"));
}

#[test]
fn every_flag_that_a_document_names_is_one_of_a_command() {
    let known = flags(&relay(&["completions", "bash"]));
    assert!(known.len() > 50, "{known:?}");
    for name in documents() {
        let unknown: Vec<String> = flags(&document(&name))
            .into_iter()
            .filter(|flag| !known.contains(flag) && !FLAGS_OF_OTHERS.contains(&flag.as_str()))
            .collect();
        assert!(
            unknown.is_empty(),
            "{name} names flags that no command has: {unknown:?}"
        );
    }
}

#[test]
fn every_variable_that_a_document_names_is_in_the_table_of_settings() {
    let known = variables(&document(SETTINGS));
    assert!(known.len() > 25, "{known:?}");
    for name in documents() {
        let named = variables(&document(&name));
        let unknown: Vec<_> = named.difference(&known).collect();
        assert!(unknown.is_empty(), "{name} names {unknown:?}");
    }
}

/// Rights are what `outbox-relay grants` prints; a list of them elsewhere would go stale.
#[test]
fn no_document_has_a_list_of_grants_beside_the_command() {
    for name in documents() {
        let text = document(&name);
        let lists: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("GRANT "))
            .collect();
        assert!(lists.is_empty(), "{name}: {lists:?}");
    }
    for name in [
        "README.md",
        "crates/producer/README.md",
        "crates/consumer/README.md",
    ] {
        assert!(document(name).contains("outbox-relay grants --"), "{name}");
    }
}

#[test]
fn flags_and_variables_are_found_in_text() {
    let found: Vec<String> = flags("| `--a-b` <X> | --c=3, not-this -- nor --- | `OUTBOX_A`")
        .into_iter()
        .collect();
    assert_eq!(found, ["--a-b", "--c"]);
    let found: Vec<String> = variables("`OUTBOX_A`, DATABASE_URL, OTHER")
        .into_iter()
        .collect();
    assert_eq!(found, ["DATABASE_URL", "OUTBOX_A"]);
}
