#!/usr/bin/env python3
"""Writes sentences for the gold file of the Moses tokenizer: frames of our own, filled with what its rules look at.

    moses_texts.py | compare_moses.py gold /dev/stdin    # see tests/fixtures/moses_gold.md

One JSON object a line with the field `text`, as `compare_moses.py gold` reads it. Nothing is random: the same script
writes the same lines.
"""

import json

TITLES = """Adm Asst Bart Bldg Brig Bros Capt Cmdr Col Comdr Con Corp Cpl Dr Drs Ens Gen Gov Hon Hosp Insp Lt Maj Messrs
Mlle Mme Mr Mrs Ms Msgr Op Ord Pfc Prof Pvt Rep Reps Res Rev Rt Sen Sens Sfc Sgt Sr St Supt Surg Inc Ltd Co Jr Esq Dept
Est Fr Pres Univ Ave Blvd Mt""".split()
LAST = "a.m. p.m. U.S. U.K. e.g. i.e. etc. Ph.D. B.A. Inc. Ltd. Jr. No. Nos. Art. pp. vs. v. St. Mr. A. x. 5. V2. km. ok.".split()
BEFORE_NUMBERS = ["No.", "Nos.", "Nr.", "Art.", "pp.", "no.", "art.", "p.", "Fig.", "Vol.", "ca.", "Sec.", "approx."]
MONTHS = "Jan. Feb. Mar. Apr. May. Jun. Jul. Aug. Sep. Sept. Oct. Nov. Dec.".split()
NUMBERS = """0 7 1,000 1,234,567 12,34,567 1.5 .5 0.05 1.234.567,89 10'000 3/4 1½ 2x 4th 1990s '90s 1990's 50% 50 % $5
$1,299.00 £3.50 4,50€ €4.50 ¥100 5°C 5 °C -3 +4 ±2 1-2 1–2 1:30 12:30:15 2.10.3 v2.9 1e10 6.02e23 0x1F 1,2,3 1, 2 1.,2
1,a a,1 1.a a.1 #5 5# No.5 10km 10 km 6'2" 90° 100kg/m² 2² H2O ⅔ Ⅳ ٣٤ ४५ １２３ 555-0134 +44-20-7946-0958 (020)79460958
2026-11-21 21/11/2026 21.11.2026 24/7 7:0 1,,000 1..5 1... 5,-""".replace("\n", " ")
NUMBERS = [word for word in NUMBERS.split(" ") if word]
QUOTES = [
    ("\u201c", "\u201d"), ("\u2018", "\u2019"), ("\u201e", "\u201c"), ("\u201a", "\u2018"), ("\u00ab", "\u00bb"),
    ("\u00ab ", " \u00bb"), ("\u2039", "\u203a"), ("\u00bb", "\u00ab"), ('"', '"'), ("'", "'"), ("``", "''"), ("`", "'"),
    ("\u00b4", "\u00b4"), ("\u300c", "\u300d"), ("\u300e", "\u300f"), ("\u201d", "\u201d"), ("\u2018\u2018", "\u2019\u2019"),
    ("\u201c\u2018", "\u2019\u201d"), ("''", "''"), ("\u00ab\u00a0", "\u00a0\u00bb"),
]
QUOTED = [
    "{}Stay here{}, said the cook.",
    "He asked {}why?{} and left.",
    "They called it {}good{}.",
    "The note said {}gone.{} Nobody knew.",
    "She wrote {}soon{}; he read {}never{}.",
    "{}It's late,{} she said, {}isn't it?{}",
]
ADDRESSES = """https://example.org http://example.org/ https://example.org/a/b.html?c=d&e=f#g www.example.com example.net
ftp://files.example.org/pub/x.tar.gz https://example.org/it's_here https://user:word@example.org:8080/~me/
https://example.org/a_(b) mailto:ann@example.org ann.lee+tag@mail.example.co.uk @ann #morning #2026 ann@example
C:\\temp\\file_1.txt /usr/share/doc ~/notes.md ./run.sh ../up/one.rs a/b a//b 10.0.0.1 10.0.0.1:80 [::1]:80 fe80::1
s3://bucket/key=1/part-00000.parquet std::io::Read foo.bar(baz) x->y &amp; &lt;b&gt; <a href="x.html"> $HOME ${x} {{y}}
%20 100%25 arXiv:1802.05365 doi:10.1000/182 ISBN 0-306-40615-2""".split()
JOINED = """well-known mother-in-law e-mail co-operate re-enter X-ray A-B -a a- --b b-- a--b a---b pre- and post-war 1914-18
twenty-one-year-old non\u2011breaking soft\u00adhyphen en\u2013dash em\u2014dash bar\u2015bar minus\u2212sign figure\u2012dash
tilde~tilde under_score and/or he/she a+b a=b a*b a|b a\\b a^b a&b AT&T R&D Q&A C++ C# F# .NET rock'n'roll
fish'n'chips o'clock ma'am y'all e.g.this U.S.-based St.-Malo 5-year-old's who's-who""".split()
APOSTROPHES = """I'm sure he'd've come if she'll stay.
You've said it's what we're after, haven't you?
The boss's desk, the bosses' desks, James' and James's.
Who's there? 'Tis I, 'twas he, 'til noon.
Singin' an' dancin' 'round the ol' oak.
She isn't; he wasn't; they mustn't; it needn't.
Let's say that's that, there's where he's been.
CAN'T STOP, WON'T STOP, DIDN'T START.
o' the morning, will-o'-the-wisp, cat-o'-nine-tails.
The '60s, the 60's, the 60s' music.
MPs' votes, CDs' covers, the Ps and Qs, p's and q's.
L'homme qu'il a vu n'est pas d'ici.
Aujourd'hui, c'est l'heure; j'ai dit qu'elle s'en va.
Presqu'île, entr'acte, quelqu'un, jusqu'à l'aube.
L\u2019eau d\u2019une source n\u2019a qu\u2019un go\u00fbt.
Dell'acqua, un'altra volta, c'era l'uomo, po' di pane.
Quest\u2019anno l\u2019inverno \u00e8 all\u2019inizio.
L'aigua d'aquest any \u00e9s m'agrada i n'hi ha.
's Morgens en 's avonds in 's-Hertogenbosch, foto's en baby's.
Ek het 'n huis en g'n tyd nie.
Das ist Hans' Haus, wie geht's, so war's, ich hab's.
Ankara'da, \u0130stanbul'un, T\u00fcrkiye'nin 1990'lar\u0131.
Vaa'an alla, ruo'on, raa'at sanat.
O'r ty i'r ysgol, mae'n wir, a'i fab.
B'fh\u00e9idir, t\u00e1 s\u00e9 d'\u00f3l, b'\u00e9 sin.
Ar c'hi hag ar c'hazh, da'm zi.
Wa\u02bba a me ka \u02bbaina, Hawai\u02bbi nei.
O\u02bbzbekiston va O'zbekiston, ma\u02bcno va ma'no.
\u041c'\u044f\u0447, \u0437'\u0457\u0437\u0434 \u0456 \u043f\u2019\u044f\u0442\u044c \u0441\u0456\u043c\u2019\u044f.
\u05e6'\u05e7, \u05d2\u05f3\u05d5\u05e0\u05d2\u05dc \u05d5\u05e6\u05d4\u05f4\u05dc, \u05d3\u05f4\u05e8 \u05db\u05d4\u05df.
\u03a4' \u03ac\u03bb\u03bb\u03bf, \u03b1\u03c0' \u03c4\u03bf \u03c3\u03c0\u03af\u03c4\u03b9, \u03b4\u03b5\u03bd \u03b5\u03af\u03bd' \u03b5\u03b4\u03ce.
Nuku\u02bbalofa, Sana'a, Xi'an, Chang'an, Qur'an.
D'Angelo, O'Hara, M'Baye, N'Djamena, L'Oeuvre.
Dunno, gonna, wanna; cannot, gimme, lemme, y'know.
'a' 'b 'c' d' 'e'f' 'g''h'.
It\u2019s \u2019bout time, \u2018bout time and `bout time.
A fool's gold'n chain's 'end'.
5's, '5, 5', '5', 5'6, s'5.
l'1er, d'1, n'3 et qu'4.""".split("\n")
SCRIPTS = """\u0412\u0447\u0435\u0440\u0430 \u0448\u0451\u043b \u0434\u043e\u0436\u0434\u044c, \u0430 \u0441\u0435\u0433\u043e\u0434\u043d\u044f \u2014 \u0441\u043d\u0435\u0433.
\u041c\u044b \u0436\u0438\u0432\u0451\u043c \u0432 \u0433. \u041e\u043c\u0441\u043a, \u0443\u043b. \u041c\u0438\u0440\u0430, \u0434. 5.
\u0426\u0435 \u043d\u0430\u0448\u0430 \u0445\u0430\u0442\u0430: \u0432\u0435\u043b\u0438\u043a\u0430, \u0442\u0435\u043f\u043b\u0430!
\u041e\u0432\u043e \u0458\u0435 \u043a\u045a\u0438\u0433\u0430 (\u0438 \u043f\u0435\u0440\u043e).
\u0397 \u03b8\u03ac\u03bb\u03b1\u03c3\u03c3\u03b1 \u03b5\u03af\u03bd\u03b1\u03b9 \u03ae\u03c1\u03b5\u03bc\u03b7 \u00b7 \u03b3\u03b9\u03b1\u03c4\u03af;
\u03a4\u03b9 \u03ce\u03c1\u03b1 \u03b5\u03af\u03bd\u03b1\u03b9\u037e \u0395\u03af\u03bd\u03b1\u03b9 5 \u03bc.\u03bc.
\u0532\u0561\u0580\u0587 \u0541\u0565\u0566, \u056b\u0576\u0579\u057a\u0565\u055e\u057d \u0565\u0584\u0589
\u10d2\u10d0\u10db\u10d0\u10e0\u10ef\u10dd\u10d1\u10d0, \u10e0\u10dd\u10d2\u10dd\u10e0 \u10ee\u10d0\u10e0?
\u05d4\u05d9\u05d5\u05dd \u05d9\u05d5\u05dd \u05d8\u05d5\u05d1, \u05e0\u05db\u05d5\u05df?
\u05d1\u05bc\u05b0\u05e8\u05b5\u05d0\u05e9\u05c1\u05b4\u05d9\u05ea \u05e0\u05b4\u05d9\u05e7\u05bc\u05d5\u05bc\u05d3.
\u0627\u0644\u0628\u064a\u062a \u0643\u0628\u064a\u0631\u060c \u0648\u0627\u0644\u062d\u062f\u064a\u0642\u0629 \u0635\u063a\u064a\u0631\u0629.
\u0643\u064e\u062a\u064e\u0628\u064e \u0627\u0644\u0648\u064e\u0644\u064e\u062f\u064f \u0627\u0644\u062f\u0651\u064e\u0631\u0652\u0633\u064e.
\u0639\u062f\u062f \u0661\u0662\u0663 \u0648\u0664\u066b\u0665 \u0648\u066a.
\u0627\u06cc\u0646 \u06a9\u062a\u0627\u0628 \u062e\u0648\u0628 \u0627\u0633\u062a\u061b \u0646\u0645\u06cc\u200c\u062f\u0627\u0646\u0645.
\u06cc\u06c1 \u0627\u06cc\u06a9 \u06a9\u062a\u0627\u0628 \u06c1\u06d2\u06d4
\u092e\u0947\u0930\u093e \u0918\u0930 \u092c\u095c\u093e \u0939\u0948\u0964 \u0924\u0941\u092e\u094d\u0939\u093e\u0930\u093e?
\u0915\u094d\u0937\u0924\u094d\u0930\u093f\u092f, \u091c\u094d\u091e\u093e\u0928 \u0914\u0930 \u0936\u094d\u0930\u0940\u0965
\u0986\u09ae\u09bf \u09ad\u09be\u09a4 \u0996\u09be\u0987\u0964
\u0a2e\u0a48\u0a02 \u0a18\u0a30 \u0a1c\u0a3e\u0a02\u0a26\u0a3e \u0a39\u0a3e\u0a02\u0964
\u0aae\u0abe\u0ab0\u0ac1\u0a82 \u0a98\u0ab0 \u0aae\u0acb\u0a9f\u0ac1\u0a82 \u0a9b\u0ac7.
\u0ba8\u0bbe\u0ba9\u0bcd \u0bb5\u0bc0\u0b9f\u0bcd\u0b9f\u0bbf\u0bb2\u0bcd \u0b87\u0bb0\u0bc1\u0b95\u0bcd\u0b95\u0bbf\u0bb1\u0bc7\u0ba9\u0bcd.
\u0c28\u0c3e \u0c07\u0c32\u0c4d\u0c32\u0c41 \u0c2a\u0c46\u0c26\u0c4d\u0c26\u0c26\u0c3f.
\u0ca8\u0ca8\u0ccd\u0ca8 \u0cae\u0ca8\u0cc6 \u0ca6\u0cca\u0ca1\u0ccd\u0ca1\u0ca6\u0cc1.
\u0d0e\u0d28\u0d4d\u0d31\u0d46 \u0d35\u0d40\u0d1f\u0d4d \u0d35\u0d32\u0d41\u0d24\u0d3e\u0d23\u0d4d.
\u0db8\u0d9c\u0dda \u0d9c\u0dd9\u0daf\u0dbb \u0dbd\u0ddc\u0d9a\u0dd4\u0dba\u0dd2.
\u0e1a\u0e49\u0e32\u0e19\u0e02\u0e2d\u0e07\u0e09\u0e31\u0e19\u0e43\u0e2b\u0e0d\u0e48 \u0e21\u0e32\u0e01\u0e46
\u0e9a\u0ec9\u0eb2\u0e99\u0e82\u0ead\u0e87\u0e82\u0ec9\u0ead\u0e8d\u0ec3\u0eab\u0e8d\u0ec8
\u1794\u17d2\u179a\u1791\u17c1\u179f\u1781\u17d2\u1789\u17bb\u17c6\u17d4
\u1019\u103c\u1014\u103a\u1019\u102c\u1005\u102c\u104b
\u0f56\u0f7c\u0f51\u0f0b\u0f61\u0f72\u0f42\u0f0d
\u12a0\u121b\u122d\u129b \u1243\u1295\u1243\u1361 \u1290\u12cd\u1362
\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002
\u6211\u6709\uff13\u672c\u4e66\uff0c\u4f60\u5462\uff1f
\u6771\u4eac\u306b\u4f4f\u3093\u3067\u3044\u307e\u3059\u3002
\u30b3\u30fc\u30d2\u30fc\u3092\u98f2\u3080\u30fb\u30d1\u30f3\u3092\u98df\u3079\u308b\u3002
\uff76\uff9e\uff77\uff9e \u534a\u89d2\u3068\uff21\uff22\uff23\u5168\u89d2\u3002
\uc800\ub294 \ud559\uc0dd\uc785\ub2c8\ub2e4. \uc544\ub2c8\uc694?
\u1112\u1161\u11ab\u1100\u1173\u11af jamo.
\u03b1, \u03b2 and \u03b3-rays; \u03bcm, \u03a9 and \u212b.
Na\u00efve caf\u00e9s in \u0141\u00f3d\u017a, \u0158\u00edp, \u015ei\u015fli and Gy\u0151r.
Nai\u0308ve cafe\u0301s and Z\u0323a\u0324l\u0325go\u0326.
Ti\u1ebfng Vi\u1ec7t c\u00f3 d\u1ea5u, ph\u1ea3i kh\u00f4ng?
I\u015f\u0131k \u0130zmir'de, \u011f\u00fcn \u00fc\u00e7\u00fcnc\u00fc.
\u00c5ngstr\u00f6m, \u00d8re, \u00c6ble, \u00deorn, \u00d0 and \u00df.
\U0001d4d0\U0001d4d1 \U0001d7d9\U0001d7da \U00010330\U00010331 \U00020000.
\u2660\u2665 \u2713 \u2714\ufe0f \u00a9 \u2122 \u2116 5 \u00a7 3.
\U0001f600\U0001f601, \U0001f44d\U0001f3fe! \U0001f1e9\U0001f1ea \u2764\ufe0f.
1\ufe0f\u20e3 \U0001f9d1\u200d\U0001f4bb \U0001f3f3\ufe0f\u200d\U0001f308""".split("\n")
SIGNS = """Well, yes; no: maybe. Who? Me! Never?!
(a) [b] {c} <d> ((e)) ([f]) (g.) (h!) (i,)
One , two ,three, four,five ,, six
... three ....four five.... . .. six...
Dots . here .. there ... where?
A. B. C. a. b. c. A.B. a.b. A.b a.B
End." "End". 'End.' (End.) [End]. End.) End."
!a ?b ;c :d ,e .f
a! b? c; d: e, f.
~a `b @c #d $e %f ^g &h *i =j +k |l \\m /n
a@b a#b a$b a%b a^b a&b a*b a=b a+b a|b a/b
a@ b# c$ d% e^ f& g* h= i+ j| k/
\u00a1Hola! \u00bfQu\u00e9? \u00a1\u00bfTodo?!
\u2026and so\u2026on\u2026 \u2026 \u2026.
5\u2030 6\u2031 7\u00b0 8\u2032 9\u2033 \u20ac1 1\u20ac
a\u00a0b c\u202fd e\u2009f 1\u00a0000 1\u202f000
a\u200bb \ufeffc \u2060d e\u200df g\u200ch
x\u0007y z\u001b[0m\u007f end.
tab\tand  two   blanks
\u3001\u3002\uff0c\uff01\uff1f\uff1a\uff1b\uff08\uff09
The U.S.A. and the U.S., a U.S.-led F.B.I.'s
J.R.R. Tolkien-like P.S. and q.v. cf. al.
Smith et al. found it. Smith et al. 2019 did.
He got a C.V. and a Ph.D., B.Sc. (Hons.) and M.A.
Go to 5th Ave. at 5 p.m. or 17:00 hrs.
Mr.Smith and Dr.Who met St.Paul in No.10.
This ends with No.
No. That is not so.
Nos. 1 to 3, Nos. one to three.
It is Art. 5 of Art. Five.
See pp. 5 and pp. five, or p. 5.
She was b. 1900, d. 1980, fl. 1950.
fig. a, tab. b, eq. c, sec. 4, vol. iv
i.e., e.g., viz., etc., et al., and so on
Hello,world!How are you?Fine.
A,B;C:D.E!F?G
1,2;3:4.5!6?7
a1,b2 a1.b2 1a,2b 1a.2b
MULTI.DOT .MULTI DOT.
MIXED case Words miXed CaSe.
i\u0307stanbul \ufb01nd \ufb00 \u01c5 \u0149""".split("\n")
NORMALISED = """\u201cA\u201d\u201cB\u201d \u2018C\u2019\u2018D\u2019
He said \u201cyes\u201d, \u201cno\u201d. \u201cso\u201d; \u201cwhy\u201d?
\u201cOne,\u201d \u201ctwo.\u201d \u201cthree\u201d, \u201cfour\u201d...
a ( b ) c ( d, e ) f [ g ]
50 % and 50\u00a0% and n\u00ba 5 and n \u00ba 5
5 \u00b0C, 5\u00a0\u00b0C, 5\u00b0 C and cm / km
what ? why ! so ; thus : there
what\u00a0? why\u00a0! so\u00a0; thus\u00a0:
\u00ab\u00a0oui\u00a0\u00bb, \u00ab non \u00bb. \u00abpeut-\u00eatre\u00bb!
\u201equote\u201c, \u201equote\u201d. \u201aquote\u2018
1\u20132, 1 \u2013 2, a\u2013b, a \u2013 b, a\u2014b, a \u2014 b
\u00b4a\u00b4 `b` ''c'' ``d'' \"e\" 'f'
(a)b c(d) e(f)g h (i) j
end \" , end \" . end\", end\".
\"a\",\"b\",\"c\".
\u3008a\u3009 \u300ab\u300b \u3010c\u3011 \uff5ed\uff5e""".split("\n")


def texts():
    yield from (f"{title}. Hale and {title} Orr came; the {title}. left." for title in TITLES)
    yield from (f"{title.lower()}. hale met {title.upper()}. HALE." for title in TITLES[::3])
    yield from (f"It was the last {word}" for word in LAST)
    yield from (f"It was {word} that came, not {word}, nor ({word})" for word in LAST)
    yield from (f"See {word} 5, {word} V and {word} five." for word in BEFORE_NUMBERS)
    yield from (f"On {month} 5 and in {month} She left in {month}" for month in MONTHS)
    yield from (f"It came to {number}, then ({number}) and {number}." for number in NUMBERS)
    yield from (frame.format(*(pair * 2)) for frame in QUOTED for pair in QUOTES)
    yield from (f"Look at {address}, or ({address})." for address in ADDRESSES)
    yield from (f"A {word} and \u201c{word}\u201d, {word}." for word in JOINED)
    yield from APOSTROPHES + SCRIPTS + SIGNS + NORMALISED


if __name__ == "__main__":
    for text in dict.fromkeys(texts()):
        print(json.dumps({"text": text}, ensure_ascii=False))
