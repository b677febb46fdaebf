//! Wrong variants of the protocol. Each lives in the model; the functions under test stay as they are.

/// What is done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Wrong {
    /// Nothing.
    Nothing,
    /// A page does not compare whose it is: neither the epoch nor the leadership of the marker.
    NoEpoch,
    /// Pages have no number.
    NoPageNumber,
    /// The facts say whatever the marker wants to hear.
    NoHistoryCheck,
    /// A gap waits for the transactions that the snapshot of its `Q` lists, and not for those of `L`.
    GapsBySnapshot,
    /// `R` and `Q` are two statements.
    TwoSnapshots,
    /// An `R` that its limit cut counts as complete.
    CutAsComplete,
    /// Rows are published before they are flushed.
    NoBarrier,
}
