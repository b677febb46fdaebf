//! The trace that a message is written in, for its headers (feature `opentelemetry`).

use std::borrow::Cow;
use std::collections::BTreeMap;

use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, TraceContextExt};
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The W3C headers of a trace.
const TRACE_PARENT: &str = "traceparent";
const TRACE_STATE: &str = "tracestate";

/// W3C asks that no more is carried on than this.
const TRACE_STATE_BYTES_MAX: usize = 512;

/// The headers with the context of the current span, unless the application gave one itself.
///
/// The current span is that of `tracing`; where it has none that is traced, that of OpenTelemetry.
pub(crate) fn continued(headers: &BTreeMap<String, String>) -> Cow<'_, BTreeMap<String, String>> {
    if headers.contains_key(TRACE_PARENT) {
        return Cow::Borrowed(headers);
    }
    let Some(context) = current() else {
        return Cow::Borrowed(headers);
    };
    let mut headers = headers.clone();
    let parent = format!(
        "00-{}-{}-{:02x}",
        context.trace_id(),
        context.span_id(),
        context.trace_flags()
    );
    headers.insert(TRACE_PARENT.to_owned(), parent);
    let state = context.trace_state().header();
    if !state.is_empty() && state.len() <= TRACE_STATE_BYTES_MAX {
        headers.insert(TRACE_STATE.to_owned(), state);
    }
    Cow::Owned(headers)
}

fn current() -> Option<SpanContext> {
    let of = |context: &Context| {
        let span = context.span();
        let found = span.span_context();
        found.is_valid().then(|| found.clone())
    };
    of(&tracing::Span::current().context()).or_else(|| of(&Context::current()))
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{SpanId, TraceFlags, TraceId, TraceState};

    use super::*;

    fn traced(state: &str) -> Context {
        let state: TraceState = state.parse().unwrap();
        let context = SpanContext::new(
            TraceId::from(0xab),
            SpanId::from(0xcd),
            TraceFlags::SAMPLED,
            false,
            state,
        );
        Context::new().with_remote_span_context(context)
    }

    #[test]
    fn the_current_trace_is_carried_on_and_a_header_of_the_application_wins() {
        let none = BTreeMap::new();
        assert!(matches!(continued(&none), Cow::Borrowed(_)));
        let _attached = traced("vendor=1").attach();
        let headers = continued(&none);
        assert_eq!(
            headers[TRACE_PARENT],
            "00-000000000000000000000000000000ab-00000000000000cd-01"
        );
        assert_eq!(headers[TRACE_STATE], "vendor=1");
        let own = BTreeMap::from([(TRACE_PARENT.to_owned(), "mine".to_owned())]);
        assert_eq!(*continued(&own), own);
    }
}
