//! The trace of a message as the parent of the handler's span (feature `opentelemetry`).

use std::collections::BTreeMap;

use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::{SpanContext, TraceContextExt};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::Message;

/// Makes the span a child of the first message's trace, and links it to those of the others of a batch.
pub(crate) fn continue_in(span: &Span, messages: &[Message]) {
    let mut contexts = messages.iter().map(|message| context_of(message.headers()));
    if let Some(Some(first)) = contexts.next() {
        // It fails where no layer exports traces, and then there is nothing to continue.
        let _ = span.set_parent(Context::new().with_remote_span_context(first));
    }
    for other in contexts.flatten() {
        span.add_link(other);
    }
}

/// Reads the W3C headers. Whatever is not understood is no trace; a state that is not understood is dropped alone.
fn context_of(headers: &BTreeMap<String, String>) -> Option<SpanContext> {
    let headers = Headers(headers);
    let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &headers);
    let context = context.span().span_context().clone();
    context.is_valid().then_some(context)
}

/// The headers of a message, as the propagator looks at them.
struct Headers<'h>(&'h BTreeMap<String, String>);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn read(parent: &str, state: &str) -> Option<SpanContext> {
        let headers = [("traceparent", parent), ("tracestate", state), ("a", "b")];
        let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned()));
        context_of(&headers.into())
    }

    #[test]
    fn headers_are_read_as_w3c_has_them() {
        let context = read(PARENT, "a=1,b=2").unwrap();
        assert_eq!(context.trace_id().to_string(), &PARENT[3..35]);
        assert_eq!(context.span_id().to_string(), &PARENT[36..52]);
        assert!(context.is_sampled() && context.is_remote());
        assert_eq!(context.trace_state().header(), "a=1,b=2");
        let stateless = read(PARENT, "nonsense").unwrap();
        assert_eq!(stateless.trace_state().header(), "");
        for bad in [
            "",
            "00-x",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        ] {
            assert!(read(bad, "").is_none(), "{bad}");
        }
        assert!(context_of(&BTreeMap::new()).is_none());
    }
}
