//! Completions and manual pages know every command and flag, and nothing that a variable holds.

use outbox_testkit::{Output, Process, relay_binary};

use crate::pair::DEADLINE;

const SECRET: &str = "s3cret-Pa55word";

/// What a command of the binary prints.
async fn printed(args: &[&str]) -> String {
    let process = Process::builder(relay_binary())
        .args(args.iter().copied())
        .env("DATABASE_URL", format!("postgres://u:{SECRET}@h/d"))
        .env("OUTBOX_NAME", SECRET)
        .spawn()
        .unwrap();
    let status = process.wait(DEADLINE).await.unwrap();
    assert!(status.success(), "{args:?}: {:#?}", process.lines());
    let text = process.lines_of(Output::Stdout).join("\n");
    assert!(!text.contains(SECRET), "{args:?}");
    text
}

#[tokio::test]
async fn bash_completes_commands_and_flags() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("outbox-relay.bash");
    std::fs::write(&script, printed(&["completions", "bash"]).await).unwrap();
    for (words, expected) in [
        ("outbox-relay stat", "status"),
        ("outbox-relay run --page-r", "--page-rows"),
        ("outbox-relay config che", "check"),
        ("outbox-relay run --on-redis-loss re", "replay"),
    ] {
        let ask = format!(
            "source {}; COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
             complete -p outbox-relay | grep -o -- '-F [^ ]*' | {{ read -r _ complete
             $complete outbox-relay \"${{COMP_WORDS[-1]}}\" \"${{COMP_WORDS[-2]}}\"; echo \"${{COMPREPLY[@]}}\"; }}",
            script.display()
        );
        let bash = Process::builder("bash").args(["-c", &ask]).spawn().unwrap();
        bash.wait(DEADLINE).await.unwrap();
        let lines = bash.lines_of(Output::Stdout);
        let offered = lines
            .iter()
            .any(|line| line.split(' ').any(|word| word == expected));
        assert!(offered, "{words}: {:#?}", bash.lines());
    }
}

#[tokio::test]
async fn every_shell_is_taught_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = printed(&["completions", shell]).await;
        for word in ["run", "migrate", "status", "verify", "config", "page-rows"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
}

#[tokio::test]
async fn each_command_has_a_manual_page() {
    let page = printed(&["man"]).await;
    assert!(page.contains(".TH outbox-relay 1"), "{page}");
    assert!(page.contains("database\\-url"), "{page}");
    let dir = tempfile::tempdir().unwrap();
    printed(&["man", "--dir", &dir.path().display().to_string()]).await;
    for (name, says) in [
        ("outbox-relay.1", "outbox\\-relay\\-run(1)"),
        ("outbox-relay-run.1", "page\\-rows"),
        ("outbox-relay-config-check.1", "Secrets are not"),
    ] {
        let page = std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert!(page.contains(says), "{name}: {page}");
        assert!(!page.contains(SECRET), "{name}");
    }
    let missing = dir.path().join("missing").display().to_string();
    let process = Process::builder(relay_binary())
        .args(["man", "--dir", &missing])
        .spawn()
        .unwrap();
    assert_eq!(process.wait(DEADLINE).await.unwrap().code(), Some(1));
    assert_eq!(process.lines().len(), 1, "{:#?}", process.lines());
}
