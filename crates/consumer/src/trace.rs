//! The trace of a message as the parent of the handler's span (feature `opentelemetry`).

use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::Message;

/// Makes the span a child of the first message's trace, and links it to those of the others of a batch.
pub(crate) fn continue_in(span: &Span, messages: &[Message]) {
    let mut contexts = messages.iter().map(context_of);
    if let Some(Some(first)) = contexts.next() {
        // It fails where no layer exports traces, and then there is nothing to continue.
        let _ = span.set_parent(Context::new().with_remote_span_context(first));
    }
    for other in contexts.flatten() {
        span.add_link(other);
    }
}

fn context_of(message: &Message) -> Option<SpanContext> {
    let state = message.header("tracestate").unwrap_or_default();
    parse(message.trace_parent()?, state)
}

/// Reads the W3C headers. Whatever is not understood is no trace; a state that is not understood is dropped alone.
fn parse(parent: &str, state: &str) -> Option<SpanContext> {
    let mut parts = parent.split('-');
    let mut hex = |digits: usize| {
        let part = parts.next()?;
        let is_hex = part
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        (part.len() == digits && is_hex).then_some(part)
    };
    let version = hex(2)?;
    let (trace, span, flags) = (hex(32)?, hex(16)?, hex(2)?);
    // A later version may have more parts behind these.
    if version == "ff" || (version == "00" && parts.next().is_some()) {
        return None;
    }
    let context = SpanContext::new(
        TraceId::from_hex(trace).ok()?,
        SpanId::from_hex(span).ok()?,
        TraceFlags::new(u8::from_str_radix(flags, 16).ok()?),
        true,
        state.parse().unwrap_or(TraceState::NONE),
    );
    context.is_valid().then_some(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn headers_are_read_as_w3c_has_them() {
        let context = parse(PARENT, "a=1,b=2").unwrap();
        assert_eq!(context.trace_id().to_string(), &PARENT[3..35]);
        assert_eq!(context.span_id().to_string(), &PARENT[36..52]);
        assert!(context.is_sampled() && context.is_remote());
        assert_eq!(context.trace_state().header(), "a=1,b=2");
        assert_eq!(
            parse(PARENT, "nonsense").unwrap().trace_state().header(),
            ""
        );
        let later = PARENT.replacen("00", "01", 1) + "-more";
        assert!(parse(&later, "").is_some());
        for bad in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        ] {
            assert!(parse(bad, "").is_none(), "{bad}");
        }
    }
}
