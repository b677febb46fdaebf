//! Many streams and many keys beside one stream.

use crate::{
    Error,
    backlog::Backlog,
    figures::{Outcome, Target},
    rows::MANY_TOPICS,
    stage::Stage,
    stats::quotients,
};

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let one = stage.backlog().await?;
    let many = Backlog::load(stage, one.rows, MANY_TOPICS).await?;
    let (mut of_one, mut of_many) = (Vec::new(), Vec::new());
    for round in 0..stage.sizes.repeats {
        stage.round("one topic", round);
        of_one.push(one.drain(stage, &[]).await?.rows_per_s);
        stage.round("100 topics", round);
        of_many.push(many.drain(stage, &[]).await?.rows_per_s);
    }
    stage.drop_database(&many.database).await?;
    Ok(Outcome::default()
        .must(
            "100 topics / one topic",
            "",
            &quotients(&of_many, &of_one),
            Target::AtLeast(0.8),
        )
        .beside("100 topics", "rows/s", &of_many)
        .beside("one topic", "rows/s", &of_one))
}
