//! Which names a pattern matches: worked out by hand, for the crate `regex` and for the regular expressions of the C library,
//! with which librdkafka matches. `tests/services/starts.rs` asks a broker.

use std::ffi::CString;

use super::*;
use crate::error::{Exit, Fault as _};

/// Whether the C library finds an extended regular expression in a name, as `rd_regex_match` of librdkafka asks it.
fn posix(expression: &str, name: &str) -> bool {
    let (expression, name) = (CString::new(expression).unwrap(), CString::new(name).unwrap());
    let mut compiled = std::mem::MaybeUninit::uninit();
    // SAFETY: both texts end with NUL; what is compiled is used only after success, and freed once.
    unsafe {
        let flags = libc::REG_EXTENDED | libc::REG_NOSUB;
        assert_eq!(libc::regcomp(compiled.as_mut_ptr(), expression.as_ptr(), flags), 0, "{expression:?}");
        let found = libc::regexec(compiled.as_ptr(), name.as_ptr(), 0, std::ptr::null_mut(), 0) == 0;
        libc::regfree(compiled.as_mut_ptr());
        found
    }
}

/// A pattern, names that it matches, and names that it does not match.
type Row = (&'static str, &'static [&'static str], &'static [&'static str]);

const MATCHES: [Row; 25] = [
    ("^reviews", &["reviews", "reviews-1", "reviewsold"], &["old-reviews", "review", "Reviews"]),
    ("^reviews$", &["reviews"], &["reviews-1", "old-reviews"]),
    ("^reviews-.*", &["reviews-", "reviews-12", "reviews-a.b_c"], &["reviews", "a-reviews-1"]),
    ("^reviews-.*$", &["reviews-", "reviews-12"], &["reviews"]),
    ("^reviews-.+", &["reviews-1"], &["reviews-"]),
    ("^reviews-[0-9]+", &["reviews-12", "reviews-1x"], &["reviews-x1"]),
    ("^reviews-[0-9]+$", &["reviews-12"], &["reviews-1x", "reviews-"]),
    ("^reviews-[[:digit:]_]+$", &["reviews-1_2"], &["reviews-a"]),
    ("^a.b", &["a.b", "axb", "a-bc"], &["ab"]),
    (r"^a\.b", &["a.b", "a.bc"], &["axb"]),
    (r"^a\-b\_c", &["a-b_c"], &["a_b-c"]),
    ("^a[.]b$", &["a.b"], &["axb"]),
    (r"^a[\.-]b$", &["a.b", "a-b"], &["a\\b", "axb"]),
    ("^[^a-z]", &["A", "0a", "-", ".x", "_a"], &["a", "zA", "__a"]),
    ("^(de|en)-reviews", &["de-reviews", "en-reviews-2"], &["fr-reviews", "x-de-reviews"]),
    ("^(de|en)$", &["de", "en"], &["den", "e"]),
    // The bar is the last to bind: each side is a pattern of its own.
    ("^a$|^b", &["a", "b", "bc"], &["ab", "ca", "cb"]),
    ("^a-b?$", &["a-", "a-b"], &["a-bb", "a"]),
    ("^(ab){2}$", &["abab"], &["ab", "ababab"]),
    ("^a{2,}$", &["aa", "aaaa"], &["a"]),
    ("^a{1,2}$", &["a", "aa"], &["aaa"]),
    // All topics but those of Kafka itself.
    ("^", &["a", "_", "_a", "_a__b", "a__b", "-", "."], &["__", "__consumer_offsets", "__transaction_state"]),
    ("^.*", &["a", "_", "_a", "_a__b", "a__b", "-", "."], &["__", "__consumer_offsets", "__transaction_state"]),
    ("^_?_?[a-c]?(_|x)$", &["_", "x", "_x", "_a_", "_ax", "a_"], &["__", "__x", "__a_", "__ax"]),
    ("^(_a|__b|_*)x$", &["_ax", "x", "_x"], &["__bx", "__x", "___x"]),
];

#[test]
fn a_pattern_means_the_same_to_all_who_match_it() {
    for (pattern, matched, others) in MATCHES {
        let parsed = Pattern::parse(pattern).unwrap();
        for (name, expected) in matched.iter().map(|name| (name, true)).chain(others.iter().map(|name| (name, false))) {
            assert_eq!(parsed.matches(name), expected, "{pattern} {name}: {}", parsed.expression());
            assert_eq!(posix(parsed.expression(), name), expected, "{pattern} {name}: {}", parsed.expression());
        }
    }
}

#[test]
fn expressions_are_anchored_and_have_no_escapes_of_one_dialect() {
    for (pattern, expression) in [
        ("^reviews", "^reviews.*$"),
        ("^reviews-.*", "^reviews-.*$"),
        (r"^a\.b\-c$", r"^a\.b-c$"),
        ("^a$|^b-[^0-9]", "^(a|b-[^0123456789].*)$"),
        ("^(x|y)[a-c-]{2,}", "^(x|y)[abc-]{2,}.*$"),
        ("^.*", "^([^_].*|_[^_].*|_)$"),
    ] {
        assert_eq!(Pattern::parse(pattern).unwrap().expression(), expression);
    }
}

#[test]
fn what_is_not_in_all_dialects_is_refused_with_its_place() {
    for (pattern, at, reason, help) in [
        (r"^reviews-\d+", 10, r"\d is not the same", "[0-9] for \\d"),
        (r"^\w", 2, r"\w is not the same", "[A-Za-z0-9_]"),
        (r"^a\b", 3, r"\b is not the same", "set"),
        (r"^[\d]", 3, r"\d is not the same", "[0-9]"),
        (r"^a\<", 3, "no name of a topic has a '<'", "letters"),
        ("^a\\", 3, "a backslash is last", "dot"),
        ("^(?i)a", 3, "groups with ?", "without ?"),
        ("^(?:a|b)", 3, "groups with ?", "(a|b)"),
        ("^a.*?", 5, "? follows another sign", "lazy"),
        ("^a*+", 4, "+ follows another sign", "possessive"),
        ("^a{2}{3}", 6, "{ follows another sign", "leave one out"),
        ("^*a", 2, "* has nothing to repeat", ".*"),
        ("^a{,2}", 3, "no number of repetitions", "{2,5}"),
        ("^a{3,2}", 3, "no number of repetitions", "{2,5}"),
        ("^a{0}", 3, "no number of repetitions", "{2,5}"),
        ("^a{x", 3, "no number of repetitions", "{2,5}"),
        ("^(a{20}){20}", 9, "more than 249 times", "so long"),
        ("^a|b", 4, "no ^", "^(a|b)"),
        ("^a|", 4, "no ^", "twice"),
        ("^a^b", 3, "^ is not at the beginning", "leave it out"),
        ("^a$b", 4, "b follows the $", "leave $ out"),
        ("^(a$|b)", 4, "$ is in parentheses", "behind them"),
        ("^$", 2, "no topic", "leave $ out"),
        ("^(a|)", 5, "an alternative is empty", "(a|b)?"),
        ("^()", 3, "an alternative is empty", "(a|b)?"),
        ("^(a", 2, "not closed", ")"),
        ("^a)", 3, "no parenthesis is open", "leave ) out"),
        ("^[a", 2, "not closed", "]"),
        ("^[]a]", 2, "no character", "letters"),
        ("^[^]a]", 2, "no character", "letters"),
        ("^[z-a]", 3, "z-a is not a range", "a-z"),
        ("^[A-z]", 3, "A-z is not a range", "a-z"),
        ("^[[:space:]]", 3, "[:digit:]", "[0-9]"),
        ("^[a&&b]", 4, "no name of a topic has a '&'", "letters"),
        ("^a,^b", 3, "no name of a topic has a ','", "letters"),
        ("^é", 2, "no name of a topic has a 'é'", "letters"),
    ] {
        let error = Pattern::parse(pattern).unwrap_err();
        let (message, advice) = (error.to_string(), error.help().unwrap());
        assert_eq!(error.exit(), Exit::Usage);
        assert!(message.starts_with(&format!("--topic '{pattern}', character {at}: ")), "{message}");
        assert!(message.contains(reason), "{reason}: {message}");
        assert!(advice.contains(help), "{pattern}: {advice}");
    }
}

#[test]
fn a_pattern_of_the_topics_of_kafka_is_refused() {
    for pattern in ["^__consumer_offsets", "^__.*", "^_{2}a$"] {
        let error = Pattern::parse(pattern).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("--topic '{pattern}' matches only topics that begin with __, which no pattern reads")
        );
        assert!(error.help().unwrap().contains("without ^"));
    }
}
