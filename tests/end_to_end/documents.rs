//! README, ARCHITECTURE and the guarantees say what is so.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use outbox_relay::metric_names;

/// A word of the map with one of these endings is the name of a file.
const FILE_ENDINGS: [&str; 8] = [
    ".rs", ".sql", ".lua", ".sh", ".toml", ".md", ".yaml", ".json",
];

/// A word that begins like this is a path, whatever its ending.
const ROOTS: [&str; 7] = [
    "crates/",
    "migrations/",
    "tests/",
    "docker/",
    "docs/",
    "scripts/",
    ".ci/",
];

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

pub(crate) fn document(name: &str) -> String {
    let path = root().join(name);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{name} cannot be read: {e}"))
}

/// The words of the code in a document: what stands between backticks, and its blocks.
fn code_words(document: &str) -> BTreeSet<String> {
    let mut words = BTreeSet::new();
    // Every odd part is code, in a text where backticks come in pairs; a fence is one more pair and a half.
    for part in document.replace("```", "`").split('`').skip(1).step_by(2) {
        for word in part.split(|c: char| c.is_whitespace() || "()[],;:\"'".contains(c)) {
            words.insert(word.trim_end_matches('.').to_owned());
        }
    }
    words
}

/// `a/{b,c}.rs` as `a/b.rs` and `a/c.rs`.
fn expand(word: &str) -> Vec<String> {
    match (word.find('{'), word.find('}')) {
        (Some(open), Some(close)) if open < close => word[open + 1..close]
            .split(',')
            .map(|middle| format!("{}{middle}{}", &word[..open], &word[close + 1..]))
            .collect(),
        _ => vec![word.to_owned()],
    }
}

fn is_path(word: &str) -> bool {
    let named = FILE_ENDINGS
        .iter()
        .any(|ending| word.len() > ending.len() && word.ends_with(ending));
    named || ROOTS.iter().any(|root| word.starts_with(root))
}

/// A path from the root or from `crates/`; a bare name may stand anywhere.
fn exists(path: &str, names: &BTreeSet<String>) -> bool {
    let root = root();
    root.join(path).exists()
        || root.join("crates").join(path).exists()
        || (!path.contains('/') && names.contains(path))
}

/// The names of all files, but for what was built.
fn file_names(dir: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() && name != "target" && name != ".git" {
            file_names(&entry.path(), names);
        } else if kind.is_file() {
            names.insert(name);
        }
    }
}

#[test]
fn every_path_that_a_document_names_exists() {
    let mut names = BTreeSet::new();
    file_names(&root(), &mut names);
    for name in ["ARCHITECTURE.md", "docs/guarantees.md"] {
        let paths: Vec<String> = code_words(&document(name))
            .iter()
            .flat_map(|word| expand(word))
            .filter(|word| is_path(word))
            .collect();
        assert!(
            paths.len() >= 5,
            "{name} names where things are; found {paths:?}"
        );
        let missing: Vec<&String> = paths.iter().filter(|p| !exists(p, &names)).collect();
        assert!(
            missing.is_empty(),
            "{name} names what is not there: {missing:?}"
        );
    }
}

#[test]
fn the_map_names_every_crate() {
    let map = document("ARCHITECTURE.md");
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let named = [format!("crates/{name}"), format!("outbox-{name}")];
        assert!(
            named.iter().any(|n| map.contains(n)),
            "ARCHITECTURE.md names neither of {named:?}"
        );
    }
}

#[test]
fn operations_explain_every_alert_and_no_other() {
    let alerts = document("docker/prometheus/alerts.yml");
    let known: BTreeSet<&str> = alerts
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("- alert: "))
        .collect();
    let operations = document("docs/operations.md");
    let explained: BTreeSet<&str> = operations
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .filter(|name| name.starts_with("Outbox"))
        .collect();
    assert!(known.len() >= 9, "{known:?}");
    assert_eq!(explained, known);
}

#[test]
fn every_test_that_the_guarantees_name_exists() {
    let guarantees = document("docs/guarantees.md");
    let mut sources = String::new();
    for package in [
        "crates/relay",
        "crates/consumer",
        "crates/producer",
        "tests",
    ] {
        rust_sources(&root().join(package), &mut sources);
    }
    // A claim has more words than any other name in code.
    let tests: Vec<String> = code_words(&guarantees)
        .into_iter()
        .filter(|word| word.matches('_').count() >= 3)
        .collect();
    assert!(
        tests.len() >= 30,
        "each promise names its tests; found {tests:?}"
    );
    let missing: Vec<&String> = tests
        .iter()
        .filter(|test| !sources.contains(&format!("fn {test}(")))
        .collect();
    assert!(
        missing.is_empty(),
        "docs/guarantees.md names tests that are not there: {missing:?}"
    );
}

#[test]
fn operations_explain_every_metric_and_no_other() {
    let operations = document("docs/operations.md");
    let mut names = String::new();
    rust_sources(&root().join("crates/relay/src"), &mut names);
    rust_sources(&root().join("crates/consumer/src"), &mut names);
    let is_name = |word: &&str| {
        ["outbox_relay_", "outbox_consumer_"].iter().any(|prefix| {
            word.strip_prefix(prefix)
                .is_some_and(|rest| !rest.is_empty())
        })
    };
    let known: BTreeSet<&str> = names.split('"').filter(is_name).collect();
    let explained: BTreeSet<&str> = operations
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .filter(is_name)
        .collect();
    assert!(known.len() >= 30, "{known:?}");
    assert_eq!(explained, known);
}

#[test]
fn dashboard_and_alerts_ask_for_metrics_that_there_are() {
    for name in [
        "docker/grafana/dashboards/outbox-relay.json",
        "docker/prometheus/alerts.yml",
    ] {
        let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
        let file = document(name);
        let asked: BTreeSet<&str> = file
            .split(|c| !is_name(c))
            .filter(|word| word.starts_with("outbox_relay_"))
            .map(|word| word.trim_end_matches("_bucket"))
            .collect();
        assert!(asked.len() >= 5, "{name}: {asked:?}");
        let unknown: Vec<_> = asked
            .iter()
            .filter(|word| !metric_names::ALL.iter().any(|metric| metric.name == **word))
            .collect();
        assert!(unknown.is_empty(), "{name} asks for {unknown:?}");
    }
}

#[test]
fn operations_explain_every_error_line() {
    let operations = document("docs/operations.md");
    let mut sources = String::new();
    for package in ["relay", "consumer", "producer"] {
        rust_sources(
            &root().join("crates").join(package).join("src"),
            &mut sources,
        );
    }
    // A text over several source lines is one.
    let sources = sources.replace("\\\n", "");
    let lines: BTreeSet<String> = sources
        .split("error!(")
        .skip(1)
        .filter_map(last_text)
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .filter(|line| line.contains(' '))
        .collect();
    assert!(lines.len() >= 10, "{lines:?}");
    let unexplained: Vec<&String> = lines
        .iter()
        .filter(|line| !operations.contains(&format!("`{line}`")))
        .collect();
    assert!(
        unexplained.is_empty(),
        "docs/operations.md does not explain: {unexplained:#?}"
    );
}

/// The text behind which a call ends.
fn last_text(call: &str) -> Option<&str> {
    let texts: Vec<&str> = call.split('"').collect();
    let ends = |rest: &str| {
        rest.trim_start()
            .trim_start_matches(',')
            .trim_start()
            .starts_with(')')
    };
    let last = texts.windows(2).position(|pair| ends(pair[1]))?;
    Some(texts[last])
}

fn rust_sources(dir: &Path, sources: &mut String) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            rust_sources(&path, sources);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            sources.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn code_words_are_found_in_spans_and_blocks() {
    let words =
        code_words("See `a/b.rs` and `c.lua, d.md`.\n\n```text\ncrates/x/ y.rs.\n```\nnot.rs");
    for word in ["a/b.rs", "c.lua", "d.md", "crates/x/", "y.rs"] {
        assert!(words.contains(word), "{words:?}");
    }
    assert!(!words.contains("not.rs"), "{words:?}");
    assert_eq!(expand("x/{a,b}.rs"), ["x/a.rs", "x/b.rs"]);
}
