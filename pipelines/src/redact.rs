//! Redacts secrets in text for people, logs and bug reports.
//!
//! If in doubt, it redacts: the user part of a URL, every value of its query (a signed URL is a key), values of
//! settings whose names suggest a secret, private keys in PEM, bearer tokens and AWS access key ids.

/// Upper bound on passes; two or three suffice in practice.
const MAX_PASSES: usize = 8;
/// Replaces a secret.
const HIDDEN: &str = "***";

/// Names of settings whose values are redacted, in lower case and without `_`, `-` and `.`, as `AccountKey` has none. A
/// longer name with this ending counts too, such as `sasl.oauthbearer.client.secret`.
const SECRET_KEYS: [&str; 28] = [
    "password",
    "passphrase",
    "passwd",
    "secret",
    "secretkey",
    "accesskey",
    "accesskeyid",
    "accountkey",
    "masterkey",
    "privatekey",
    "saskey",
    "sastoken",
    "bearertoken",
    "apikey",
    "authtoken",
    "accesstoken",
    "sessiontoken",
    "securitytoken",
    "signature",
    "sig",
    "credential",
    // Settings of Kafka and of schema registries.
    "keypem",
    "keystorekey",
    "userinfo",
    "jaasconfig",
    "oauthbearerconfig",
    "sslkey",
    "oauthbearerextensions",
];

/// Returns `text` without its secrets. It is idempotent: what one rule replaces may let another match, so all rules are
/// applied until nothing changes.
pub fn redact(text: &str) -> String {
    let mut once = apply_rules(text);
    for _ in 0..MAX_PASSES {
        let again = apply_rules(&once);
        if again == once {
            break;
        }
        once = again;
    }
    once
}

fn apply_rules(text: &str) -> String {
    // First: other rules would take a key's first line for a value, and what follows for text.
    let text = redact_private_keys(text);
    let text = redact_urls(&text);
    let text = redact_settings(&text);
    let text = redact_sql_options(&text);
    let text = redact_bearer(&text);
    redact_aws_keys(&text)
}

/// Redacts serialised JSON and returns valid JSON: string by string, field names excepted.
///
/// [`redact`] would corrupt it: after a string that ends in `password=`, it would take the closing quote for the
/// opening quote of a value.
pub(crate) fn redact_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let (mut rest, mut secret) = (json, false);
    while let Some(at) = rest.find('"') {
        let (before, after) = rest.split_at(at);
        let (literal, after) = after.split_at(literal_len(after));
        out.push_str(before);
        if after.starts_with(':') {
            secret = is_secret_key(literal.trim_matches('"'));
            out.push_str(literal);
        } else {
            out.push_str(&redact_literal(literal, secret));
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Bytes of the string literal that `text` begins with, both quotes included.
fn literal_len(text: &str) -> usize {
    let mut escaped = false;
    for (i, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return i + 1,
            _ => {}
        }
    }
    text.len()
}

/// Redacts a string literal; the value of a `secret` field is replaced entirely.
fn redact_literal(literal: &str, secret: bool) -> String {
    let Ok(text) = serde_json::from_str::<String>(literal) else { return redact(literal) };
    let clean = if secret && !text.is_empty() { HIDDEN.to_owned() } else { redact(&text) };
    match clean == text {
        true => literal.to_owned(),
        false => serde_json::Value::String(clean).to_string(),
    }
}

/// Whether a URL in prose ends at `c`. A quote or bracket may also belong to an unescaped password: [`user_end`] skips
/// those that an `@` follows.
fn ends_url(c: char) -> bool {
    c.is_whitespace() || matches!(c, '"' | '\'' | '`' | '<' | '>' | '|')
}

fn redact_urls(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        out.push_str(before);
        let user = user_end(after);
        if user > 0 {
            out.push_str(HIDDEN);
            out.push('@');
        }
        let after = &after[user..];
        let end = after.find(ends_url).unwrap_or(after.len());
        push_without_query(&mut out, &after[..end]);
        rest = &after[end..];
    }
    out.push_str(rest);
    out
}

/// Length of `user:password@` at the start of `after`, the text after `://`; 0 when there is none.
fn user_end(after: &str) -> usize {
    let word = after.find(char::is_whitespace).unwrap_or(after.len());
    let word = &after[..word];
    let authority = word.find(['/', '?', '#']).unwrap_or(word.len());
    // `user:12/ss@host` (an unescaped `/` in a password) looks like `host:8080/a@b`, and `user:@/ss@host` like
    // `user:@/path@b`. Redacting a path does less harm than showing a password.
    match word.rfind('@') {
        Some(at) if word[..authority].contains([':', '@']) => at + 1,
        _ => 0,
    }
}

/// Appends a URL without the values of its query and without its fragment.
fn push_without_query(out: &mut String, url: &str) {
    let (url, fragment) = url.split_once('#').map_or((url, false), |(url, rest)| (url, !rest.is_empty()));
    let Some((path, query)) = url.split_once('?') else {
        out.push_str(url);
        return push_fragment(out, fragment);
    };
    out.push_str(path);
    for (i, pair) in query.split('&').enumerate() {
        out.push(if i == 0 { '?' } else { '&' });
        match pair.split_once('=') {
            Some((key, _)) => out.extend([key, "=", HIDDEN]),
            None if pair.is_empty() => {}
            None => out.push_str(HIDDEN),
        }
    }
    push_fragment(out, fragment);
}

fn push_fragment(out: &mut String, fragment: bool) {
    if fragment {
        out.push('#');
        out.push_str(HIDDEN);
    }
}

fn is_key_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}

/// Whether the values of a setting with this name are secret.
pub(crate) fn is_secret_key(key: &str) -> bool {
    let key = key.to_ascii_lowercase().replace(['-', '_', '.'], "");
    SECRET_KEYS.iter().any(|secret| key.ends_with(secret))
}

/// Redacts `name=value`, `name: value` and `"name": "value"`.
fn redact_settings(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['=', ':']) {
        let (before, after) = rest.split_at(at);
        out.push_str(before);
        out.push_str(&after[..1]);
        rest = &after[1..];
        // A backslash escapes the quotes of JSON inside a JSON string.
        let key = before.trim_end_matches(['"', '\'', ' ', '\\']);
        let key = key.rsplit(|c| !is_key_char(c)).next().unwrap_or_default();
        if is_secret_key(key) {
            rest = push_hidden_value(&mut out, rest);
        }
    }
    out.push_str(rest);
    out
}

/// Redacts the options of SQL statements: `'name' 'value'`.
fn redact_sql_options(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\'') {
        let (before, after) = rest.split_at(at + 1);
        out.push_str(before);
        rest = after;
        let key = before[..at].rsplit(|c| !is_key_char(c)).next().unwrap_or_default();
        let value = rest.trim_start();
        if is_secret_key(key) && value.len() < rest.len() && value.starts_with('\'') {
            let (blank, value) = rest.split_at(rest.len() - value.len());
            out.push_str(blank);
            rest = push_hidden_value(&mut out, value);
        }
    }
    out.push_str(rest);
    out
}

/// Appends the quote or blanks before a value and [`HIDDEN`] for the value. Returns the text after the value.
fn push_hidden_value<'a>(out: &mut String, rest: &'a str) -> &'a str {
    let start = rest.len() - rest.trim_start_matches([' ', '"', '\'', '\\']).len();
    out.push_str(&rest[..start]);
    let (lead, value) = rest.split_at(start);
    let end = value_end(lead, value);
    if end > 0 {
        out.push_str(HIDDEN);
    }
    &value[end..]
}

/// Length of a value that follows `lead`. A quoted value ends at its quote, another one at the end of the word.
fn value_end(lead: &str, value: &str) -> usize {
    let quote = lead.chars().next_back().filter(|c| matches!(c, '"' | '\''));
    let escaped = |at: usize| value[..at].ends_with('\\');
    let end = match quote {
        // `\"` inside `"..."` belongs to the value.
        Some(quote) if !lead[..lead.len() - 1].ends_with('\\') => {
            return value.match_indices(quote).map(|(at, _)| at).find(|at| !escaped(*at)).unwrap_or(value.len());
        }
        Some(quote) => value.find(quote),
        None => value.find(|c: char| c.is_whitespace() || matches!(c, '&' | ',' | ';' | '"' | '\'')),
    };
    match end {
        Some(at) if value[at..].starts_with(['"', '\'']) && escaped(at) => at - 1,
        Some(at) => at,
        None => value.len(),
    }
}

/// Redacts what is between the first and the last line of a private key in PEM; without a last line, all that follows.
fn redact_private_keys(text: &str) -> String {
    const LABEL_END: &str = "PRIVATE KEY-----";
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(LABEL_END) {
        let (first, body) = rest.split_at(at + LABEL_END.len());
        out.push_str(first);
        rest = body;
        if first.rfind("-----BEGIN ").is_some_and(|begin| !first[begin + 1..].contains("-----END ")) && !body.is_empty()
        {
            out.push_str(HIDDEN);
            rest = body.find("-----END ").map_or("", |end| &body[end..]);
        }
    }
    out.push_str(rest);
    out
}

fn redact_bearer(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.to_ascii_lowercase().find("bearer ") {
        let (before, after) = rest.split_at(at + "bearer ".len());
        out.push_str(before);
        let end = after.find(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',')).unwrap_or(after.len());
        if end > 0 {
            out.push_str(HIDDEN);
        }
        rest = &after[end..];
    }
    out.push_str(rest);
    out
}

/// Redacts AWS access key ids: `AKIA` or `ASIA` and sixteen more capitals or digits.
fn redact_aws_keys(text: &str) -> String {
    const LEN: usize = 20;
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = [rest.find("AKIA"), rest.find("ASIA")].into_iter().flatten().min() {
        let (before, after) = rest.split_at(at);
        out.push_str(before);
        let len = after.bytes().take_while(|b| b.is_ascii_uppercase() || b.is_ascii_digit()).count();
        if len >= LEN {
            out.push_str(HIDDEN);
            rest = &after[len..];
        } else {
            out.push_str(&after[..4]);
            rest = &after[4..];
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hides_what_a_url_carries() {
        for (text, expected) in [
            ("cannot read s3://key:secret@bucket/a.txt: no", "cannot read s3://***@bucket/a.txt: no"),
            ("https://h/p?X-Amz-Signature=ab12&versionId=3", "https://h/p?X-Amz-Signature=***&versionId=***"),
            ("https://h/p?sastoken", "https://h/p?***"),
            ("http://user:pa/ss?w@host/x", "http://***@host/x"),
            ("s3://u:12/x@host/p", "s3://***@host/p"),
            ("s3://u:/~x@host/p", "s3://***@host/p"),
            ("two: a://u@h/x b://v:w@i/y", "two: a://***@h/x b://***@i/y"),
            ("\"https://h/a?b=c\"", "\"https://h/a?b=***\""),
        ] {
            assert_eq!(redact(text), expected);
        }
    }

    #[test]
    fn leaves_harmless_text_alone() {
        for text in [
            "s3://bucket/a@b/c.parquet",
            "http://localhost:9000/bucket/a",
            "1234 tokens, 5 tokens/s, token: 7",
            "reviews.jsonl, row 3: what? no",
            "",
        ] {
            assert_eq!(redact(text), text);
        }
    }

    #[test]
    fn hides_settings_and_headers() {
        for (text, expected) in [
            ("aws_secret_access_key = abc/def+ghi", "aws_secret_access_key = ***"),
            ("?sv=2024-11-04&sig=a%2Fb", "?sv=2024-11-04&sig=***"),
            (
                "OPTIONS ('aws.secret_access_key' 'a b', 'format' 'csv')",
                "OPTIONS ('aws.secret_access_key' '***', 'format' 'csv')",
            ),
            // A connection string, as Azure's documentation has them.
            ("AccountName=x;AccountKey=aB3/+w==;EndpointSuffix=y", "AccountName=x;AccountKey=***;EndpointSuffix=y"),
            ("SharedAccessKey=abc apiKey: d", "SharedAccessKey=*** apiKey: ***"),
            ("AWS_ACCESS_KEY_ID=x, region=eu", "AWS_ACCESS_KEY_ID=***, region=eu"),
            ("{\"sasl.password\": \"a b c\", \"x\": 1}", "{\"sasl.password\": \"***\", \"x\": 1}"),
            (r#"password: "a \"b\" c", x"#, r#"password: "***", x"#),
            (r#"{\"password\": \"hunter2\"} x"#, r#"{\"password\": \"***\"} x"#),
            (r#"\"password=hunter2\" x"#, r#"\"password=***\" x"#),
            ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
            ("-X sasl.password=hunter2 -X client.id=e", "-X sasl.password=*** -X client.id=e"),
            ("ssl.key.password: hunter2", "ssl.key.password: ***"),
            ("sasl.oauthbearer.client.secret=hunter2", "sasl.oauthbearer.client.secret=***"),
            ("basic.auth.user.info=me:hunter2", "basic.auth.user.info=***"),
            ("ELMO_KAFKA_SSL_KEY_PEM=hunter2", "ELMO_KAFKA_SSL_KEY_PEM=***"),
            (
                "a -----BEGIN PRIVATE KEY-----\nMIIB\nVQ==\n-----END PRIVATE KEY----- b",
                "a -----BEGIN PRIVATE KEY-----***-----END PRIVATE KEY----- b",
            ),
            ("x -----BEGIN RSA PRIVATE KEY-----\nMIIBVQ==", "x -----BEGIN RSA PRIVATE KEY-----***"),
            ("ssl.key.pem=-----BEGIN PRIVATE KEY-----\nMIIB", "ssl.key.pem=*** PRIVATE KEY-----***"),
            // The key id of the AWS documentation's own examples.
            ("user AKIAIOSFODNN7EXAMPLE may not", "user *** may not"),
        ] {
            assert_eq!(redact(text), expected);
        }
    }

    #[test]
    fn json_stays_json() {
        for (json, expected) in [
            (r#"{"output": "/x/my_password=","parts": 1}"#, r#"{"output": "/x/my_password=","parts": 1}"#),
            (r#"{"output": "password: \"hunter2","parts": 1}"#, r#"{"output": "password: \"***","parts": 1}"#),
            (r#"{"url":"s3://k:hunter2@b/c","x":["secret=1"]}"#, r#"{"url":"s3://***@b/c","x":["secret=***"]}"#),
            (r#"{"sasl.password": "a\"b", "kept": "c\\"}"#, r#"{"sasl.password": "***", "kept": "c\\"}"#),
            (r#"{"password": "", "n": -1.5e3}"#, r#"{"password": "", "n": -1.5e3}"#),
            ("7", "7"),
        ] {
            assert_eq!(redact_json(json), expected);
        }
    }

    #[test]
    fn rules_that_meet_agree_in_the_end() {
        for text in
            ["-----BEGIN PRIVATE KEY-----PRIVATE KEY-----x", "://x#\"y@", "?secret://x=", "a://b:c@d?secret=e://f#g"]
        {
            let once = redact(text);
            assert_eq!(redact(&once), once, "{text}");
        }
    }

    proptest! {
        #[test]
        fn redacted_json_has_the_redacted_strings(
            a in r#"([a-z]{1,3}|://|[:/?#@&= "'\\]|bearer |secret=|password: |AKIA){0,24}"#, b in ".{0,40}"
        ) {
            let json = serde_json::json!({ "a": a, "b": [b, 7] });
            let expected = serde_json::json!({ "a": redact(&a), "b": [redact(&b), 7] });
            for text in [json.to_string(), format!("{json:#}")] {
                let clean: serde_json::Value = serde_json::from_str(&redact_json(&text)).unwrap();
                prop_assert_eq!(&clean, &expected);
            }
        }

        #[test]
        fn no_password_survives(
            scheme in "(s3|gs|az|https?)", user in "[a-z0-9]{1,8}", secret in "[A-Za-z0-9/+?#:%@!$*()_.~=-]{8,24}Zq7",
            before in "[a-z .,]{0,20}", after in "[a-z .,]{0,20}"
        ) {
            let text = format!("{before}{scheme}://{user}:{secret}@host.example/path{after}");
            prop_assert!(!redact(&text).contains(&secret), "{}", redact(&text));
        }

        #[test]
        fn no_query_value_survives(key in "[A-Za-z-]{1,20}", secret in "[A-Za-z0-9/+%_.~=-]{8,24}Zq7", end in "[\"' ,]?") {
            let text = format!("GET https://host/path?a=b&{key}={secret}{end}");
            prop_assert!(!redact(&text).contains(&secret), "{}", redact(&text));
        }

        #[test]
        fn twice_is_once(text in ".{0,80}") {
            let once = redact(&text);
            prop_assert_eq!(redact(&once), once);
        }

        #[test]
        fn twice_is_once_for_url_like_text(text in "([a-z]{1,3}|://|[:/?#@&= \"']|bearer |secret|AKIA|\\*\\*\\*){0,24}") {
            let once = redact(&text);
            prop_assert_eq!(redact(&once), once);
        }

        #[test]
        fn prose_is_left_alone(text in "[a-zA-Z ,.()/%-]{0,80}") {
            prop_assume!(!text.to_ascii_lowercase().contains("bearer") && !text.contains("AKIA") && !text.contains("ASIA"));
            prop_assert_eq!(redact(&text), text);
        }
    }
}
