//! The headers of a message: checked when it is read, and taken apart when they are first asked for.

use std::{borrow::Cow, collections::BTreeMap, fmt, sync::OnceLock};

use serde::{
    Deserialize, Deserializer as _,
    de::{MapAccess, Visitor},
};

/// Headers as they were published, a JSON object of strings.
#[derive(Debug, Clone)]
pub(crate) struct Headers {
    text: Option<String>,
    by_name: OnceLock<BTreeMap<String, String>>,
}

impl Headers {
    /// What is no object of strings counts as none.
    pub(crate) fn new(text: Option<String>) -> Self {
        Self {
            text,
            by_name: OnceLock::new(),
        }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        self.text.as_deref()
    }

    pub(crate) fn by_name(&self) -> &BTreeMap<String, String> {
        self.by_name.get_or_init(|| {
            let headers = self.text().map(serde_json::from_str);
            headers.and_then(Result::ok).unwrap_or_default()
        })
    }
}

/// Whether a text is an object of strings, without keeping any of it.
pub(crate) fn check(text: &str) -> Result<(), serde_json::Error> {
    let mut json = serde_json::Deserializer::from_str(text);
    json.deserialize_map(Strings)?;
    json.end()
}

struct Strings;

/// Borrowed from the JSON, but for strings with escapes.
#[derive(Deserialize)]
struct Text<'t>(
    #[serde(borrow)]
    #[allow(dead_code, reason = "that it can be read is all that counts")]
    Cow<'t, str>,
);

impl<'de> Visitor<'de> for Strings {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_entry::<Text<'_>, Text<'_>>()?.is_some() {}
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_accepts_what_can_be_taken_apart_and_nothing_else() {
        for text in [
            "{}",
            r#"{"a":"1","b":"\u00e9\n\"x\""}"#,
            r#" {"a" : "1" , "a" : "2"} "#,
            r#"{"\u0061":""}"#,
            "null",
            "[]",
            r#""a""#,
            "",
            "{",
            r#"{"a":1}"#,
            r#"{"a":null}"#,
            r#"{"a":{}}"#,
            r#"{"a":"1"} x"#,
            r#"{"a":"\ud800"}"#,
            r#"{"a":"1",}"#,
        ] {
            let parsed = serde_json::from_str::<BTreeMap<String, String>>(text);
            let checked = check(text);
            assert_eq!(
                checked.map_err(|error| error.to_string()),
                parsed.map(drop).map_err(|error| error.to_string()),
                "{text}"
            );
        }
    }

    #[test]
    fn headers_are_found_by_their_name() {
        let headers = Headers::new(Some(r#"{"a":"\u00e9","a":"2"}"#.to_owned()));
        assert_eq!(headers.by_name()["a"], "2");
        assert!(Headers::new(None).by_name().is_empty());
        assert!(Headers::new(Some("[]".to_owned())).by_name().is_empty());
    }
}
