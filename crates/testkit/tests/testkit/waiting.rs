use std::{cell::Cell, time::Duration};

use outbox_testkit::eventually;

use crate::DEADLINE;

#[tokio::test]
async fn a_condition_that_comes_true_ends_the_wait_with_its_value() {
    let looks = Cell::new(0);
    let value = eventually(DEADLINE, "the third look", || async {
        looks.set(looks.get() + 1);
        (looks.get() == 3).then_some("seen")
    })
    .await;
    assert_eq!(value.unwrap(), "seen");
}

#[tokio::test]
async fn a_missed_deadline_names_what_was_awaited_and_seen() {
    let wait = eventually(Duration::from_millis(20), "five rows", || async {
        Err::<(), _>(4)
    });
    let error = wait.await.unwrap_err();
    assert!(error.is_timeout());
    assert_eq!(error.to_string(), "waited 20ms for five rows; last seen: 4");
}

#[tokio::test]
async fn a_probe_that_hangs_is_cut_off() {
    let wait = eventually(
        Duration::from_millis(20),
        "nothing",
        std::future::pending::<bool>,
    );
    assert!(wait.await.unwrap_err().is_timeout());
}
