//! Words of other languages that change a number: negations, comparisons, alternatives, and powers of ten.

use std::sync::LazyLock;

use regex::Regex;

/// Signs of Chinese, Japanese and Korean that multiply the number before them.
const SCALES: [(char, i64); 14] = [
    ('十', 10),
    ('百', 100),
    ('千', 1000),
    ('万', 10_000),
    ('萬', 10_000),
    ('亿', 100_000_000),
    ('億', 100_000_000),
    ('兆', 1_000_000_000_000),
    ('십', 10),
    ('백', 100),
    ('천', 1000),
    ('만', 10_000),
    ('억', 100_000_000),
    ('조', 1_000_000_000_000),
];

/// Units that begin with such a sign.
const UNITS: [&str; 8] = ["千克", "千米", "千瓦", "千卡", "千字节", "百分点", "조각", "만원권"];

/// Number of bytes and value of the power of ten at the start of `word`.
pub(super) fn scale_of(word: &str) -> Option<(usize, i64)> {
    let first = word.chars().next()?;
    let (_, factor) = SCALES.iter().find(|(sign, _)| *sign == first)?;
    (!UNITS.iter().any(|unit| word.starts_with(unit))).then_some((first.len_utf8(), *factor))
}

/// Words after a number that multiply it, in languages with letters.
pub(super) fn count_of(word: &str) -> Option<i64> {
    const COUNTS: [(&str, i64); 8] = [
        ("cientos cem hundert cento сотен сотни सौ مئة مائة trăm ratus", 100),
        (
            "tausend mille mila тысяча тысячи тысяч हज़ार हजार ألف آلاف nghìn ngàn ribu tysiąc tysiące tysięcy duizend tusen",
            1000,
        ),
        ("लाख", 100_000),
        (
            "millón millones milhão milhões millionen milione milioni миллион миллиона миллионов مليون ملايين triệu juta \
             milion miliony milionów milyon miljoen miljoner मिलियन",
            1_000_000,
        ),
        ("करोड़", 10_000_000),
        (
            "milliard milliarde milliarden milliards miliardo miliardi миллиард миллиарда миллиардов مليار tỷ miliar \
             miliard miljard",
            1_000_000_000,
        ),
        ("billón billones billionen", 1_000_000_000_000),
        ("триллион триллиона триллионов", 1_000_000_000_000),
    ];
    COUNTS
        .iter()
        .find(|(words, _)| words.split_whitespace().any(|known| known == word))
        .map(|(_, count)| *count)
}

/// Returns true if `word` is percent.
pub(super) fn is_percent(word: &str) -> bool {
    ["prozent", "процент", "процента", "процентов", "प्रतिशत", "퍼센트", "パーセント", "procent", "yüzde"]
        .contains(&word)
}

/// Returns true if `word`, after a number, takes it back or changes it.
pub(super) fn doubts(word: &str) -> bool {
    const WORDS: &str = "por pour ciento cento medio media demi demie halb halbe meio mezzo mil половиной не нет नहीं \
        değil nicht pas kein более менее больше меньше oder ou или mehr weniger más menos plus moins";
    const PARTS: &str = "以上 以下 以内 以外 左右 分之 次方 多 余 几 半 折 成 割 不 非 没 错 吗 或 至 到 和 与 より まで ではな ではあり 이상 이하 \
        미만 초과 정도 아니 아닙 또는 十 百 万 亿 零 一 二 三 四 五 六 七 八 九 第 负 約 约";
    /// Counting words and units in which a numeral, or another sign of [`PARTS`], changes nothing.
    const UNITS: [&str; 5] = ["千克", "千米", "千瓦", "百分点", "成员"];
    WORDS.split_whitespace().any(|known| known == word)
        || (!UNITS.contains(&word)
            && word.chars().any(is_foreign_letter)
            && PARTS.split_whitespace().any(|part| word.contains(part)))
}

/// Returns true for letters of scripts other than Latin and Greek.
pub(super) fn is_foreign_letter(c: char) -> bool {
    c.is_alphabetic() && c as u32 >= 0x400 && !(0x1d00..0x2e80).contains(&(c as u32))
}

/// Returns true for marks on or after a letter, which are no letters themselves.
pub(super) fn is_mark(c: char) -> bool {
    let code = c as u32;
    let indic = (0x900..0xe00).contains(&code) && code != 0x964 && code != 0x965;
    indic
        || (0x300..0x370).contains(&code)
        || (0x64b..0x660).contains(&code)
        || (0xe31..0xe50).contains(&code)
}

/// Returns true if `before` negates, compares or lists the number behind it, in another language.
pub(super) fn negates_before(before: &str) -> bool {
    static DIRECT: LazyLock<Regex> = LazyLock::new(|| {
        let denied = "不是|不等[于於]|[并並]非|不[为為]|不[会會]是|不可能|没有|除了|假[设設]|若|如果";
        let compared = any_of(
            r"比 大[于於] 小[于於] [至最][少多] 超[过過] 少[于於] 多[于於] 低[于於] 高[于於] 不足 [约約] 近似 接近 可能 也[许許] 或[许許] 最小 最大 약 최소 최대",
        );
        let listed = "或者?|以及|到|至|[从從]|から|より|または|또는|이나";
        let operators = "第|[负負]|[减減]|乘以?|除以?|加上?|百分之|根[号號]|分之|マイナス|마이너스|[零〇一二三四五六七八九十百千万萬亿億两]";
        let is = "(?:是|[为為]|等[于於]|有|はい)?";
        // `和是 5` is a sum, `3 和 5` is a list.
        let and = any_of(
            r"[和与與及跟とや와과] [0-9$]\s*(?:y|et|und|e|и|och|en|dan|và|ve)
              \b(?:ou|oder|или|hoặc|atau|veya|lub|eller|або|أو|या) [0-9$]\s*(?:o|a|à|bis|до)",
        );
        pattern(&format!(r"(?i)(?:(?:{denied}|{compared}|{listed}|{operators}){is}|(?:{and})\s*)[\s$*(（]*$"))
    });
    static CLAUSE: LazyLock<Regex> = LazyLock::new(|| {
        let negated = any_of(
            r"nicht keine?[mnrs]? niemals nie nunca ni pas jamais não nem non né не ни нет ليس ليست لا không
              bukan tidak niet geen inte ikke nej değil ei ไม่(?:ใช่)? नहीं ne",
        );
        let compared = any_of(
            r"mindestens höchstens (?:weniger|mehr|größer|kleiner|höher|niedriger)\s+als ungefähr etwa
              vielleicht wahrscheinlich
              (?:menos|más|mayor|menor|mais|maior|plus|moins|supérieure?|inférieure?|più|meno|maggiore|minore)\s+(?:de|del|do|que|di|che|à|a|o)
              aproximadamente alrededor quizás? tal\s+vez au\s+(?:moins|plus) environ peut-être talvez cerca
              almeno circa forse больше меньше более менее около примерно возможно أكثر أقل ربما
              (?:ít|nhiều|lớn|nhỏ)\s+hơn khoảng (?:lebih|kurang)(?:\s+dari)? mungkin kira-kira
              (?:meer|minder|groter|kleiner)\s+dan ongeveer misschien (?:mer|större|mindre)\s+än cirka kanske
              belki yaklaşık około może casi unos unas presque fast knapp quase quasi почти लगभग करीब حوالي
              تقريبا hơn gần sekitar hampir ประมาณ เกือบ ponad prawie bijna nästan neredeyse kira menos moins
              meno минус минимум максимум",
        );
        let supposed = "wenn|falls|angenommen|supongamos|si|supposons|suponha|если|пусть|допустим|jika|nếu";
        pattern(&format!(r"(?i)(?:^|[\s'’({{])(?:{negated}|{compared}|{supposed})(?:\s|$)"))
    });
    const MOST_CHARS: usize = 60;
    let start = before.char_indices().rev().take(MOST_CHARS).last().map_or(0, |(start, _)| start);
    let last = &before[start..];
    let clause = last.rfind(['.', ';', ':', '?', '!', ',', '\n', '=']).map_or(last, |end| &last[end + 1..]);
    DIRECT.is_match(last) || CLAUSE.is_match(clause)
}

/// Returns true if `after` negates, bounds or continues the number before it, in another language.
pub(super) fn negates_after(after: &str) -> bool {
    static DIRECT: LazyLock<Regex> = LazyLock::new(|| {
        let counter = r"[\s$*)\]}个個種种元米人次岁歳円개명원]{0,4}";
        let bounds = "以上|以下|以[内內]|以外|左右|多|[余餘]|[几幾]|分之|次方|半|折|成|割|より|から|まで|ほど|くらい|보다|이상|이하|미만|초과|정도|가량|쯤";
        let joins = any_of(
            r"(?:或|和|与|與|、|到|至|または|または|と|와|과|또는)\s*[$*(-]*(?:[0-9]|\$)
              \s(?:ou|oder|или|hoặc|atau|veya|lub|eller|o|y|et|und|e|и|أو|या)\s+[$*(-]*[0-9]",
        );
        let more = r"\s*(?:से\s+(?:अधिक|कम|ज़्यादा)|['’]?\p{L}{0,3}\s+(?:fazla|az)\b|[大小高低])";
        let percent =
            r"\s*(?:prozent|процент|por\s*cien|por\s*cento|pour\s*cent|per\s*cento|प्रतिशत|퍼센트|パーセント)";
        pattern(&format!("(?i)^(?:{counter}(?:{bounds}|{joins})|{joins}|{percent}|{more})"))
    });
    static DENIED: LazyLock<Regex> = LazyLock::new(|| {
        let words = any_of(
            r"아니 아닙 ではな ではあり じゃな でない नहीं नही 不(?:对|對|是|正确) [吗嗎] ですか 인가요 입니까
              \b(?:değil|ist\s+falsch|es\s+falso|est\s+faux|неверно|неправильно)\b",
        );
        pattern(&format!("(?i){words}"))
    });
    const MOST_CHARS: usize = 30;
    let end = after.char_indices().nth(MOST_CHARS).map_or(after.len(), |(end, _)| end);
    let next = &after[..end];
    let sentence = next.find(['.', ',', '!', '\n', ';']).map_or(next, |end| &next[..end]);
    DIRECT.is_match(next) || DENIED.is_match(sentence)
}

/// Alternatives of a pattern, from a list with spaces between them.
pub(super) fn any_of(alternatives: &str) -> String {
    alternatives.split_whitespace().collect::<Vec<_>>().join("|")
}

fn pattern(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of this file")
}
