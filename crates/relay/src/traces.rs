//! Traces: a span for each message whose producer's trace is sampled, from the sending of its page to Redis' reply, as
//! a child of the producer's span (feature `otlp`).
//!
//! The message itself is not touched: its headers go out as the producer wrote them, and the consumer's span is a child of
//! the producer's, too.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{
    Span as _, SpanContext, SpanKind, TraceContextExt as _, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};

use crate::error::{Error, Result};
use crate::postgres::MessageRow;

/// Where the spans go; unset where no exporter is configured, and then nothing is looked at.
static TRACER: OnceLock<SdkTracer> = OnceLock::new();

/// How long a stop waits for spans that are not sent yet.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// Spans of one page, at the most.
const SPANS_MAX: usize = 1_000;

/// Sends the spans of this process to a collector until it is ended.
#[derive(Debug)]
pub struct TraceExport(SdkTracerProvider);

/// Begins to send spans by OTLP over HTTP. `endpoint` is the collector's base address, such as `http://localhost:4318`.
///
/// The standard variables of OpenTelemetry are heeded beside it: `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`,
/// `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_TIMEOUT`, `OTEL_BSP_*`.
///
/// # Errors
///
/// [`Error::Config`] for an address that is no `http://` URL.
pub fn export_traces(endpoint: &str) -> Result<TraceExport> {
    let refused = |problem: String| Error::Config {
        field: "--otlp-endpoint",
        problem,
    };
    if !endpoint.starts_with("http://") {
        return Err(refused(
            "must be the http:// URL of a collector, e.g. http://localhost:4318".into(),
        ));
    }
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_http()
        .with_endpoint(format!("{}/v1/traces", endpoint.trim_end_matches('/')))
        .build()
        .map_err(|error| refused(error.to_string()))?;
    let mut resource = Resource::builder();
    if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
        resource = resource.with_service_name("outbox-relay");
    }
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        // The producer decides; the relay begins no traces.
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::AlwaysOff)))
        .with_resource(resource.build())
        .build();
    let _ = TRACER.set(provider.tracer("outbox-relay"));
    Ok(TraceExport(provider))
}

impl TraceExport {
    /// Sends what is left, for a second at the most.
    ///
    /// It blocks the thread: call it where nothing else waits, at the end of the process.
    pub fn end(self) {
        if let Err(error) = self.0.shutdown_with_timeout(FLUSH_LIMIT) {
            tracing::warn!(%error, "the last spans are not exported");
        }
    }
}

/// A message whose publishing gets a span.
#[derive(Debug)]
pub(crate) struct Traced {
    parent: SpanContext,
    topic: String,
    message_key: String,
}

/// The message as a trace has it, if its producer's is sampled. Costs one look where no exporter is configured.
pub(crate) fn traced(row: &MessageRow) -> Option<Traced> {
    TRACER.get()?;
    Some(Traced {
        parent: context_of(row.headers()?)?,
        topic: row.topic().to_owned(),
        message_key: row.message_key().to_owned(),
    })
}

/// Records that messages were published, in the time up to now.
pub(crate) fn published(messages: &mut Vec<Traced>, took: Duration) {
    let Some(tracer) = TRACER.get() else { return };
    let done = SystemTime::now();
    for message in messages.drain(..).take(SPANS_MAX) {
        let attributes = [
            KeyValue::new("messaging.system", "redis"),
            KeyValue::new("messaging.operation.type", "send"),
            KeyValue::new("messaging.destination.name", message.topic),
            KeyValue::new("messaging.message.id", message.message_key),
        ];
        let parent = Context::new().with_remote_span_context(message.parent);
        let builder = tracer
            .span_builder("publish")
            .with_kind(SpanKind::Producer)
            .with_start_time(done - took)
            .with_attributes(attributes);
        let mut span = tracer.build_with_context(builder, &parent);
        span.end_with_timestamp(done);
    }
}

/// The sampled trace that a message carries.
fn context_of(headers: &[u8]) -> Option<SpanContext> {
    let headers: HashMap<String, String> = serde_json::from_slice(headers).ok()?;
    let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &headers);
    let context = context.span().span_context().clone();
    (context.is_valid() && context.is_sampled()).then_some(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sampled_trace_is_continued() {
        let headers = |flags: &str| {
            let parent = format!("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}");
            format!(r#"{{"a":"b","traceparent":"{parent}","tracestate":"v=1"}}"#)
        };
        let context = context_of(headers("01").as_bytes()).unwrap();
        assert_eq!(context.span_id().to_string(), "b7ad6b7169203331");
        assert_eq!(context.trace_state().header(), "v=1");
        assert!(context_of(headers("00").as_bytes()).is_none());
        assert!(context_of(br#"{"traceparent":"00-x"}"#).is_none());
        assert!(context_of(b"{}").is_none());
    }
}
