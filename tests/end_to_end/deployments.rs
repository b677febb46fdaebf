//! Image, compose file, manifests, unit and dashboard name what there is: commands, flags, variables, paths, ports.
//!
//! None of them is run here: that takes a container engine, a cluster and an init system.

use std::collections::BTreeSet;

use crate::documents::{document, root};
use crate::settings::{SETTINGS, flags, relay, variables};

const IMAGE: &str = "docker/Dockerfile";
const COMPOSE: &str = "docker/compose.yaml";
const KUBERNETES: &str = "deploy/kubernetes/outbox-relay.yaml";
const UNIT: &str = "deploy/systemd/outbox-relay.service";
const PROMETHEUS: &str = "docker/prometheus/prometheus.yml";

/// Where all of them have the relay answer HTTP requests.
const PORT: &str = "9464";

/// The lines of a file that hold this text.
fn lines(name: &str, part: &str) -> Vec<String> {
    let text = document(name);
    let lines = text.lines().filter(|line| line.contains(part));
    let found: Vec<String> = lines.map(|line| line.trim().to_owned()).collect();
    assert!(!found.is_empty(), "{name} has no {part:?}");
    found
}

/// The words of a command line, whether a list in brackets or words with spaces between.
fn words(line: &str) -> Vec<String> {
    let is_end = |c: char| c.is_whitespace() || "[]\",".contains(c);
    let words = line.split(is_end).filter(|word| !word.is_empty());
    words.map(str::to_owned).collect()
}

#[test]
fn every_command_line_is_one_that_the_relay_takes() {
    let starts = [
        (IMAGE, "CMD ["),
        (COMPOSE, "command: [\"migrate"),
        (COMPOSE, "command: [\"run"),
        (KUBERNETES, "args: ["),
        (UNIT, "ExecStart="),
    ];
    for (name, start) in starts {
        for line in lines(name, start) {
            let words = words(&line);
            let command = ["run", "migrate", "ready"];
            let at = words
                .iter()
                .position(|word| command.contains(&word.as_str()));
            let at = at.unwrap_or_else(|| panic!("{name}: {line}"));
            let known = flags(&relay(&[&words[at], "--help"]));
            let unknown: Vec<String> = flags(&words[at..].join(" "))
                .difference(&known)
                .cloned()
                .collect();
            assert!(unknown.is_empty(), "{name}: {line}: {unknown:?}");
        }
    }
}

#[test]
fn every_variable_is_a_setting() {
    let known = variables(&document(SETTINGS));
    for name in [IMAGE, COMPOSE, KUBERNETES, UNIT] {
        let named = variables(&document(name));
        assert!(!named.is_empty(), "{name}");
        let unknown: Vec<_> = named.difference(&known).collect();
        assert!(unknown.is_empty(), "{name} sets {unknown:?}");
    }
}

#[test]
fn all_of_them_have_the_relay_answer_on_one_port() {
    for (name, part) in [
        (IMAGE, "EXPOSE "),
        (IMAGE, "ENV OUTBOX_LISTEN="),
        (COMPOSE, "--listen"),
        (KUBERNETES, "--listen"),
        (KUBERNETES, "containerPort:"),
        (KUBERNETES, "prometheus.io/port:"),
        (UNIT, "--listen"),
        (PROMETHEUS, "port:"),
    ] {
        for line in lines(name, part) {
            assert!(line.contains(PORT), "{name}: {line}");
        }
    }
}

#[test]
fn probes_ask_for_paths_that_are_answered() {
    let http = document("crates/relay/src/http.rs");
    let asked: BTreeSet<String> = lines(KUBERNETES, "httpGet:")
        .iter()
        .filter_map(|line| Some(line.split_once("path: ")?.1.split(',').next()?.to_owned()))
        .collect();
    assert_eq!(asked.len(), 2, "{asked:?}");
    for path in asked {
        assert!(http.contains(&format!("\"{path}\"")), "{path}");
    }
}

/// The kubelet sees that a user is not root only if it is a number.
#[test]
fn the_image_is_built_from_what_there_is_and_runs_as_a_number() {
    let user = &lines(IMAGE, "USER ")[0];
    let user = user.trim_start_matches("USER ");
    assert!(
        user.split(':')
            .all(|id| id.parse::<u32>().is_ok_and(|id| id > 0)),
        "{user}"
    );
    assert_eq!(lines(KUBERNETES, "runAsNonRoot").len(), 1);

    let build = lines(IMAGE, "cargo build").concat();
    let words = words(&build);
    let behind = |flag: &str| {
        let at = words.iter().position(|word| word == flag).unwrap();
        words[at + 1].clone()
    };
    // The build that the benchmark measures.
    assert!(words.contains(&"--release".to_owned()), "{build}");
    assert!(document(IMAGE).contains("target/release/outbox-relay"));
    let manifest = document("Cargo.toml");
    let features = document("crates/relay/Cargo.toml");
    assert!(features.contains(&format!("\n{} = [", behind("--features"))));
    let rust = format!("FROM rust:{}-", rust_version(&manifest));
    assert!(document(IMAGE).contains(&rust), "{rust}");
    for kept in lines("docker/Dockerfile.dockerignore", "!") {
        let kept = kept.trim_start_matches('!');
        assert!(root().join(kept).exists(), "{kept}");
    }
}

fn rust_version(manifest: &str) -> String {
    let line = manifest
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = "));
    line.unwrap().trim_matches('"').to_owned()
}

/// What compose mounts is there, and the dashboard asks the source that is provisioned.
#[test]
fn what_compose_mounts_is_there() {
    for line in lines(COMPOSE, "- ./") {
        let path = line.trim_start_matches("- ./").split(':').next().unwrap();
        assert!(root().join("docker").join(path).exists(), "{line}");
    }
    let home = &lines(COMPOSE, "HOME_DASHBOARD_PATH")[0];
    let file = home.rsplit('/').next().unwrap();
    let dashboard = format!("docker/grafana/dashboards/{file}");
    let source = "docker/grafana/provisioning/datasources/prometheus.yaml";
    let uid = lines(source, "uid:")[0]
        .trim_start_matches("uid: ")
        .to_owned();
    for asked in lines(&dashboard, "\"uid\": \"").iter().skip(1) {
        assert!(asked.contains(&uid), "{asked}");
    }
    for rules in lines(PROMETHEUS, ".yml")
        .iter()
        .filter(|line| line.starts_with("- "))
    {
        let path = format!("docker/prometheus/{}", rules.trim_start_matches("- "));
        assert!(root().join(&path).exists(), "{path}");
    }
}
